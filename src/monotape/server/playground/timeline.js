// Where the time went: the phases of the last answer, and the stages of one token where the backend has clocks.

function ganttRow(name, spans, total, note) {
  const track = element("div", { class: "track" });
  spans.forEach(({ label, start, length, tone }) => {
    const bar = element("i", { class: tone, title: `${label}: ${milliseconds(length)}` });
    bar.style.left = `${(100 * start) / total}%`;
    bar.style.width = `max(2px, ${(100 * length) / total}%)`;
    track.append(bar);
  });
  return element(
    "div",
    { class: "gantt" },
    element("span", { class: "name" }, name),
    track,
    element("span", { class: "value" }, note),
  );
}

function showPhases() {
  const answer = chat.last;
  const box = byId("phases");
  byId("trace").disabled = !answer;
  if (!answer)
    return box.replaceChildren(element("p", { class: "small" }, "No answer yet: ask something in Chat."));
  const phases = answer.timings?.phases ?? [];
  const seen = answer.endAt - answer.sentAt;
  const first = (answer.firstAt ?? answer.endAt) - answer.sentAt;
  const before = phases.filter((phase) => phase.phase !== "decode");
  const untilDecode = Math.max(0.001, ...before.map((phase) => phase.start_ms + phase.ms));
  const total = Math.max(seen, ...phases.map((phase) => phase.start_ms + phase.ms));
  const row = (phase, scale) =>
    ganttRow(
      phase.phase,
      [
        {
          label: phase.phase,
          start: phase.start_ms,
          length: phase.ms,
          tone: phase.phase === "decode" ? "made" : "fresh",
        },
      ],
      scale,
      milliseconds(phase.ms),
    );
  const note = (text) => element("p", { class: "small" }, text);
  const decode = phases.find((phase) => phase.phase === "decode");
  const known = untilDecode + (decode?.ms ?? 0);
  box.replaceChildren(
    element("h3", {}, "The last answer"),
    ...(phases.length
      ? [
          note(`On the server, until it decodes: ${milliseconds(untilDecode)}`),
          ...before.map((phase) => row(phase, untilDecode)),
        ]
      : []),
    ...(decode
      ? [
          note(
            `The whole answer: ${milliseconds(total)}. Elsewhere is the way to the server and back, and this page.`,
          ),
          row({ phase: "until it decodes", start_ms: 0, ms: untilDecode }, total),
          row(decode, total),
          row({ phase: "elsewhere", start_ms: known, ms: Math.max(0, total - known) }, total),
        ]
      : []),
    ...(phases.length ? [] : [note("The answer was stopped before the server reported its phases.")]),
    note("The same, as this browser saw it"),
    ganttRow(
      "until first text",
      [{ label: "until first text", start: 0, length: first, tone: "fresh" }],
      total,
      milliseconds(first),
    ),
    ganttRow(
      "streaming",
      [{ label: "streaming", start: first, length: seen - first, tone: "made" }],
      total,
      milliseconds(seen - first),
    ),
  );
}

function showStages() {
  const stages = server.info?.token_timeline;
  const box = byId("stages");
  const heading = element("h3", {}, "One token, by stage");
  if (!stages) {
    const why = server.info
      ? `The ${server.info.backend} backend keeps no clock for each stage, so there is nothing measured to show.`
      : "";
    return box.replaceChildren(heading, element("p", { class: "small" }, why));
  }
  const total = Math.max(...stages.map((stage) => stage.start_us + stage.us)) / 1000;
  const rows = stages.map((stage) =>
    ganttRow(
      stage.stage,
      [{ label: stage.stage, start: stage.start_us / 1000, length: stage.us / 1000, tone: "made" }],
      total,
      milliseconds(stage.us / 1000),
    ),
  );
  box.replaceChildren(
    heading,
    element("p", { class: "small" }, `From the device's clock, ${milliseconds(total)} in all`),
    ...rows,
  );
}

function showTimeline() {
  showPhases();
  showStages();
}

// The trace-event format, which Perfetto and chrome://tracing open. Times are in microseconds.
function traceOf(answer) {
  const event = (track, name, start, length, args = {}) => ({
    ph: "X",
    pid: 1,
    tid: track,
    name,
    ts: 1000 * start,
    dur: 1000 * length,
    args,
  });
  const named = (track, name) => ({ ph: "M", pid: 1, tid: track, name: "thread_name", args: { name } });
  const found = [named(1, "server"), named(2, "browser"), named(3, "chunks"), named(4, "one token")];
  for (const phase of answer.timings?.phases ?? [])
    found.push(event(1, phase.phase, phase.start_ms, phase.ms));
  const first = (answer.firstAt ?? answer.endAt) - answer.sentAt;
  found.push(
    event(2, "until first text", 0, first),
    event(2, "streaming", first, answer.endAt - answer.sentAt - first),
  );
  answer.chunks.forEach((chunk, index) => {
    const before = answer.chunks[index - 1] ?? { time: answer.sentAt, tokens: 0 };
    found.push(
      event(
        3,
        `${(chunk.tokens ?? 0) - (before.tokens ?? 0)} tokens`,
        before.time - answer.sentAt,
        chunk.time - before.time,
        { tokens: chunk.tokens },
      ),
    );
  });
  for (const stage of server.info?.token_timeline ?? [])
    found.push(event(4, stage.stage, stage.start_us / 1000, stage.us / 1000));
  return { traceEvents: found, otherData: { ...server.info, token_timeline: null, metrics: answer.metrics } };
}

function startTimeline() {
  byId("trace").addEventListener("click", () =>
    download("monotape-trace.json", "application/json", JSON.stringify(traceOf(chat.last))),
  );
}
