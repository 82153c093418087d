// Speaks to the server: one question at a time, its answer as it comes, and errors as something a person can read.

const server = { info: null, key: memory.get("key", "") };

class ServerError extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

function requestHeaders() {
  const headers = { "Content-Type": "application/json" };
  if (server.key) headers.Authorization = `Bearer ${server.key}`;
  return headers;
}

async function refusal(response) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // Not JSON: a proxy may have answered. The status still says enough.
  }
  return new ServerError(error?.message ?? `The server answered ${response.status}.`, {
    status: response.status,
    code: error?.code ?? null,
    retryAfter: response.headers.get("Retry-After"),
  });
}

async function send(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function loadInfo() {
  server.info = await (await send("monotape/info", { headers: requestHeaders() })).json();
  return server.info;
}

// The events of a stream, each with the moment at which it was here.
async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The connection broke in the middle of the answer.");
    }
    if (piece.done) throw new ServerError("The answer ended without its end.");
    const time = performance.now();
    buffer += decoder.decode(piece.value, { stream: true });
    const lines = buffer.split("\n");
    buffer = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield { time, data: JSON.parse(data) };
    }
  }
}

// What is under way, if anything: the server decodes one request at a time, so the page asks one at a time too.
const activity = { controller: null };

function stop() {
  activity.controller?.abort();
}

/* Asks, and gives the answer with everything that was measured about it.
   `onChunk` sees the answer so far after every event; an interrupted answer is an answer. */
async function ask(messages, settings, onChunk) {
  if (activity.controller) throw new ServerError("Another answer is still being made.");
  const controller = new AbortController();
  activity.controller = controller;
  document.body.classList.add("busy");
  const answer = {
    text: "",
    thoughts: "",
    chunks: [],
    usage: null,
    timings: null,
    metrics: null,
    finish: null,
    reading: null, // how much of the prompt has been read, while it is
    sentAt: performance.now(),
    wallClock: Date.now(),
    firstAt: null,
    endAt: null,
  };
  const body = {
    model: server.info?.model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    timings_per_token: true,
    return_progress: true,
    ...settings,
  };
  try {
    const options = {
      method: "POST",
      headers: requestHeaders(),
      body: JSON.stringify(body),
      signal: controller.signal,
    };
    const response = await send("v1/chat/completions", options);
    for await (const { time, data } of events(response)) {
      take(answer, time, data);
      onChunk(answer);
    }
  } catch (error) {
    if (error.name !== "AbortError") throw Object.assign(error, { answer });
    answer.finish = "stopped";
  } finally {
    answer.endAt = performance.now();
    activity.controller = null;
    document.body.classList.remove("busy");
  }
  return answer;
}

function take(answer, time, data) {
  if (data.error)
    throw new ServerError(data.error.message ?? "The server ended the answer.", { code: data.error.code });
  const choice = data.choices?.[0];
  const text = choice?.delta?.content ?? "";
  const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
  answer.text += text;
  answer.thoughts += thought;
  if (choice?.finish_reason) answer.finish = choice.finish_reason;
  if (data.prompt_progress) answer.reading = data.prompt_progress;
  if (data.usage) answer.usage = data.usage;
  if (data.metrics) answer.metrics = data.metrics;
  if (data.timings) answer.timings = { ...answer.timings, ...data.timings };
  if (!text && !thought) return;
  answer.firstAt ??= time;
  answer.chunks.push({
    time,
    tokens: data.timings?.predicted_n ?? null,
    engineMs: data.timings?.predicted_ms ?? null,
    characters: answer.text.length,
  });
}
