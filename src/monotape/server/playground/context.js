// Speed against context: a point for every answer, the ceiling as a line, and a sweep that measures on purpose.

const FEWEST = 8; // tokens below which an answer says little about speed
const SWEEP_TOKENS = 32;

const points = memory.get("points", []);

function addPoint(answer) {
  const figures = figuresOf(answer);
  if (!figures.finished || figures.speed == null || (figures.produced ?? 0) < FEWEST) return;
  points.push({
    context: Math.round(meanContext(figures)),
    speed: figures.speed,
    itl50: figures.itl50,
    itl99: figures.itl99,
    produced: figures.produced,
  });
  memory.set("points", points.slice(-200));
  showPoints();
}

function chartScale() {
  const longest = Math.max(256, ...points.map((point) => point.context));
  const right = Math.min(server.info?.context ?? Infinity, 2 ** Math.ceil(Math.log2(1.1 * longest)));
  const top = roundUp(1.08 * Math.max(ceilingAt(0) ?? 0, ...points.map((point) => point.speed), 10));
  const size = { width: byId("chart").clientWidth || 720, height: 300 };
  const x = (context) => 48 + ((size.width - 64) * context) / right;
  const y = (speed) => size.height - 46 - ((size.height - 68) * speed) / top;
  return { right, top, x, y, ...size };
}

function axis(scale) {
  const label = (x, y, anchor, text) => element("text", { x, y, "text-anchor": anchor }, text);
  const across = [0, 0.2, 0.4, 0.6, 0.8, 1].flatMap((share) => {
    const y = scale.y(share * scale.top);
    return [
      element("line", { class: "grid", x1: 48, x2: scale.width - 16, y1: y, y2: y }),
      label(42, y + 4, "end", count(share * scale.top)),
    ];
  });
  const down = (scale.width < 480 ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]).map((share) =>
    label(
      scale.x(share * scale.right),
      scale.height - 26,
      share === 1 ? "end" : "middle",
      count(share * scale.right),
    ),
  );
  return [
    ...across,
    ...down,
    label(48, 12, "start", "tok/s"),
    label(scale.width - 16, scale.height - 6, "end", "tokens in context"),
  ];
}

function showPoints() {
  const scale = chartScale();
  const drawing = element(
    "svg",
    {
      viewBox: `0 0 ${scale.width} ${scale.height}`,
      class: "chart",
      role: "img",
      "aria-label": `Speed against context, ${points.length} points; the table below has the numbers`,
    },
    ...axis(scale),
  );
  if (ceilingAt(0)) {
    const steps = Array.from({ length: 41 }, (_, index) => (scale.right * index) / 40);
    drawing.append(
      element("polyline", {
        class: "ceiling",
        points: steps.map((at) => `${scale.x(at).toFixed(1)},${scale.y(ceilingAt(at)).toFixed(1)}`).join(" "),
      }),
    );
    drawing.append(
      element(
        "text",
        {
          class: "ceiling-name",
          x: scale.x(scale.right / 4),
          y: scale.y(ceilingAt(scale.right / 4)) - 8,
          "text-anchor": "start",
        },
        "speed of light",
      ),
    );
  }
  for (const point of points) {
    drawing.append(
      element(
        "circle",
        { cx: scale.x(point.context), cy: scale.y(point.speed), r: 4.5 },
        element("title", {}, `${count(point.context)} tokens: ${speedText(point.speed)} tok/s`),
      ),
    );
  }
  byId("chart").replaceChildren(drawing);
  showTable();
}

function showTable() {
  const heads = ["context", "tok/s", "of light", "p50", "p99"];
  const rows = [...points]
    .sort((a, b) => a.context - b.context)
    .map((point) => {
      const ceiling = ceilingAt(point.context);
      const cells = [
        count(point.context),
        speedText(point.speed),
        ceiling ? `${((100 * point.speed) / ceiling).toFixed(0)} %` : DASH,
        milliseconds(point.itl50),
        milliseconds(point.itl99),
      ];
      return element("tr", {}, ...cells.map((cell) => element("td", {}, cell)));
    });
  const table = element(
    "table",
    { class: "numbers" },
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))),
    element("tbody", {}, ...rows),
  );
  byId("points").replaceChildren(
    points.length ? table : element("p", { class: "small" }, "No points yet. Chat, race, or measure."),
  );
  byId("forget").disabled = !points.length;
}

/* Longer and longer prompts of one word. Each begins with the one before it, so the server computes only what is new,
   and what is measured is decoding. Lengths are those the server counts. */
async function sweepLengths() {
  const context = server.info?.context ?? 2048;
  const lengths = [32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768].filter(
    (length) => length + SWEEP_TOKENS + 64 <= context,
  );
  for (const [index, length] of lengths.entries()) {
    byId("sweep-text").textContent = `${index + 1} of ${lengths.length}: about ${count(length)} tokens`;
    const prompt = `Repeat the word: ${"tape ".repeat(length)}`;
    const answer = await ask(
      [{ role: "user", content: prompt }],
      { max_tokens: SWEEP_TOKENS, temperature: 0, ignore_eos: true },
      perFrame(showInstruments),
    );
    if (answer.finish === "stopped") return "stopped";
    remember(answer);
  }
  return `${lengths.length} lengths measured, ${SWEEP_TOKENS} tokens each`;
}

let sweeping = false;

async function sweep() {
  if (sweeping) return stop();
  sweeping = true;
  hideFailure();
  byId("sweep").textContent = "Stop";
  try {
    byId("sweep-text").textContent = await sweepLengths();
  } catch (error) {
    byId("sweep-text").textContent = "";
    showFailure(error);
  }
  sweeping = false;
  byId("sweep").textContent = "Measure from short to long";
  showInstruments(chat.last);
}

function startContext() {
  addEventListener("resize", perFrame(showPoints));
  byId("sweep").addEventListener("click", sweep);
  byId("forget").addEventListener("click", () => {
    points.length = 0;
    memory.set("points", []);
    showPoints();
  });
}
