# syntax=docker/dockerfile:1
# The server in a container: `docker build --target cpu -t monotape:cpu .`, or `--target cuda -t monotape:cuda`.
# Both run `monotape serve` and, because Ray is in them, `monotape deploy` and the nodes of a Ray cluster.

FROM python:3.12-slim-bookworm AS wheel
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src ./src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm AS cpu
# wget is what KubeRay's probes call.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends wget && rm -rf /var/lib/apt/lists/* \
  && useradd --create-home --uid 1000 monotape && install -d -o monotape /cache
COPY --from=wheel /wheels /wheels
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[cluster]"
USER 1000
WORKDIR /cache
ENV MONOTAPE_CACHE=/cache HF_HOME=/cache/huggingface \
  RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=monotape.cluster.proxies.middlewares \
  RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=30
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["monotape"]
CMD ["serve", "smollm2", "--host", "0.0.0.0"]

# NVRTC comes with the Python packages; the driver comes from the host, through NVIDIA's container runtime.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS cuda
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv wget \
  && rm -rf /var/lib/apt/lists/* && userdel --remove ubuntu && useradd --create-home --uid 1000 monotape && install -d -o monotape /cache
COPY --from=wheel /wheels /wheels
ENV PATH=/opt/monotape/bin:$PATH
# hadolint ignore=DL3013
RUN python3 -m venv /opt/monotape && pip install --no-cache-dir "$(ls /wheels/*.whl)[cluster,cuda]"
USER 1000
WORKDIR /cache
ENV MONOTAPE_CACHE=/cache HF_HOME=/cache/huggingface \
  RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=monotape.cluster.proxies.middlewares \
  RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=30
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["monotape"]
CMD ["serve", "smollm2", "--host", "0.0.0.0"]
