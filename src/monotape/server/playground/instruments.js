// The panel beside the conversation: the dial, the figures, the context bar and the speed-of-light gauge.

const ARC = { radius: 84, from: -210, to: 30 }; // degrees; the dial opens downwards

function pointOn(degrees, radius) {
  const angle = (degrees * Math.PI) / 180;
  return [100 + radius * Math.cos(angle), 100 + radius * Math.sin(angle)];
}

function arcPath(share) {
  const end = ARC.from + (ARC.to - ARC.from) * Math.min(1, Math.max(0.0001, share));
  const [x0, y0] = pointOn(ARC.from, ARC.radius);
  const [x1, y1] = pointOn(end, ARC.radius);
  const large = end - ARC.from > 180 ? 1 : 0;
  return `M${x0} ${y0}A${ARC.radius} ${ARC.radius} 0 ${large} 1 ${x1} ${y1}`;
}

// A round number at or above a value, so that a scale has an end one can read.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value);
}

class Dial {
  constructor(parent) {
    this.value = element("path", { class: "value", d: arcPath(0) });
    this.light = element("g", { class: "light" });
    this.number = element("text", { class: "number", x: 100, y: 104, "text-anchor": "middle" }, DASH);
    this.unit = element("text", { class: "unit", x: 100, y: 126, "text-anchor": "middle" }, "tok/s");
    this.possible = element("text", { class: "end", x: 100, y: 146, "text-anchor": "middle" }, "");
    this.ends = [
      element("text", { class: "end", x: 27, y: 160, "text-anchor": "middle" }, "0"),
      element("text", { class: "end", x: 173, y: 160, "text-anchor": "middle" }, ""),
    ];
    this.ticks = element("g", { class: "ticks" });
    this.svg = element("svg", {
      viewBox: "0 0 200 168",
      role: "img",
      "aria-label": "Speed: not measured yet",
    });
    this.svg.append(
      element("path", { class: "track", d: arcPath(1) }),
      this.value,
      this.ticks,
      this.light,
      this.number,
      this.unit,
      this.possible,
      ...this.ends,
    );
    parent.append(this.svg);
    this.top = null;
  }

  scaleTo(ceiling, speed) {
    const top = roundUp(1.05 * Math.max(ceiling ?? 0, speed ?? 0, 10));
    if (top === this.top && ceiling === this.ceiling) return;
    Object.assign(this, { top, ceiling });
    this.ends[1].textContent = count(top);
    this.ticks.replaceChildren(
      ...Array.from({ length: 11 }, (_, index) => {
        const degrees = ARC.from + ((ARC.to - ARC.from) * index) / 10;
        const [[x1, y1], [x2, y2]] = [pointOn(degrees, 70), pointOn(degrees, index % 5 ? 73 : 75)];
        return element("line", { x1, y1, x2, y2 });
      }),
    );
    this.light.replaceChildren();
    this.possible.textContent = ceiling ? `light ${speedText(ceiling)}` : "";
    if (!ceiling) return;
    const degrees = ARC.from + ((ARC.to - ARC.from) * ceiling) / top;
    const [[x1, y1], [x2, y2]] = [pointOn(degrees, 75), pointOn(degrees, 96)];
    this.light.append(
      element(
        "line",
        { x1, y1, x2, y2 },
        element("title", {}, `speed of light: ${speedText(ceiling)} tok/s`),
      ),
    );
  }

  show(speed, ceiling, live) {
    this.scaleTo(ceiling, speed);
    this.value.setAttribute("d", arcPath((speed ?? 0) / this.top));
    this.number.textContent = speedText(speed);
    this.unit.textContent = live ? "tok/s now" : "tok/s";
    this.svg.classList.toggle("idle", speed == null);
    if (!live)
      this.svg.setAttribute(
        "aria-label",
        speed == null ? "Speed: not measured yet" : `Speed: ${speedText(speed)} tokens per second`,
      );
  }
}

function width(node, share) {
  node.style.width = `${(100 * Math.min(1, Math.max(0, share || 0))).toFixed(2)}%`;
}

let dial = null;

function showInstruments(answer) {
  const figures = answer ? figuresOf(answer) : {};
  const ceiling = ceilingAt(meanContext(figures) ?? 0);
  dial ??= new Dial(byId("dial"));
  dial.show(figures.speed ?? null, ceiling, Boolean(answer) && !figures.finished && answer.endAt == null);
  byId("ttft").textContent = milliseconds(figures.ttft ?? figures.seenTtft);
  byId("fresh").textContent = count(figures.fresh);
  byId("cached").textContent = count(figures.cached);
  byId("produced").textContent = count(figures.produced);
  byId("drafts").textContent = `${count(figures.accepted)} of ${count(figures.drafted)}`;
  byId("drafts-figure").hidden = !figures.drafted;
  byId("itl50").textContent = milliseconds(figures.itl50);
  byId("itl99").textContent = milliseconds(figures.itl99);
  showContext(figures);
  showLight(figures.speed ?? null, ceiling, figures.accepted);
  byId("panel-line").textContent = panelLine(figures, ceiling);
}

// All that is left of the instruments where they are folded.
function panelLine(figures, ceiling) {
  if (figures.speed == null) return "Instruments";
  const parts = [`${speedText(figures.speed)} tok/s`];
  if (ceiling) parts.push(`${((100 * figures.speed) / ceiling).toFixed(0)} % of light`);
  const used = (figures.prompt ?? 0) + (figures.produced ?? 0);
  if (server.info?.context) parts.push(`${count(used)} of ${count(server.info.context)} tokens`);
  return parts.join(" · ");
}

// On a small screen the instruments are folded until somebody wants them; beside the chat they are always open.
function startPanel() {
  const narrow = matchMedia("(max-width: 899px)");
  const panel = byId("panel");
  const fold = () => (panel.open = !narrow.matches || memory.get("panel", false));
  narrow.addEventListener("change", fold);
  panel.addEventListener("toggle", () => narrow.matches && memory.set("panel", panel.open));
  fold();
}

function showContext(figures) {
  const context = server.info?.context;
  const used = (figures.prompt ?? 0) + (figures.produced ?? 0);
  byId("context-text").textContent = context ? `${count(used)} of ${count(context)} tokens` : DASH;
  const [cached, fresh, made] = byId("context-bar").children;
  width(cached, (figures.cached ?? 0) / context);
  width(fresh, (figures.fresh ?? 0) / context);
  width(made, (figures.produced ?? 0) / context);
}

function showLight(speed, ceiling, accepted) {
  const { info } = server;
  const share = speed && ceiling ? speed / ceiling : null;
  width(byId("light-bar").firstElementChild, share);
  byId("light-text").textContent =
    share == null ? (ceiling ? `${speedText(ceiling)} tok/s` : DASH) : `${(100 * share).toFixed(0)} %`;
  byId("light-note").textContent = info ? lightNote(info, speed, share, accepted) : "";
}

function lightNote(info, speed, share, accepted) {
  const { bandwidth_bytes_per_second: bandwidth, bytes_per_token: cost } = info;
  if (!bandwidth) return "The memory bandwidth of this machine has not been measured.";
  const sentences = [
    `A token reads ${bytes(cost.weights)} of weights and ${bytes(cost.kv_per_position)} for each position ` +
      `before it; measured read bandwidth ${(bandwidth / 1e9).toFixed(1)} GB/s.`,
  ];
  if (share != null) {
    sentences.unshift(
      `${speedText(speed)} tok/s = ${(100 * share).toFixed(0)} % of what this memory can do.`,
    );
  }
  if (accepted) {
    sentences.push(`${count(accepted)} tokens were drafts: they read no weights of their own.`);
  } else if (share > 1) {
    sentences.push(
      "Above 100 %: some of it came from a cache, or the bandwidth was measured on a busy machine.",
    );
  }
  return sentences.join(" ");
}

function showPlate() {
  const { info } = server;
  if (!info) return;
  const facts = [
    ["model", info.model],
    ["weights", info.dtype],
    ["context", count(info.context)],
    ["backend", `${info.backend}, ${info.workers} worker${info.workers === 1 ? "" : "s"}`],
  ];
  byId("plate").replaceChildren(
    ...facts.map(([name, value]) => element("span", {}, element("b", {}, name), ` ${value}`)),
  );
  byId("foot").textContent =
    `Monotape ${info.version} · KV ${info.kv_dtype ?? DASH} · conversations are kept in this browser only`;
  byId("lane-live-name").textContent = `${info.model}, ${info.dtype}, ${info.backend}`;
}
