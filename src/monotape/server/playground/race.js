// Two lanes with the same tokens: the live answer, and its replay at a speed that a slider chooses.

const FAR = 50000; // tokens of the extrapolation
const RACE_TOKENS = 600;

const race = { answer: null, running: false, drawing: false, skipped: false, done: false };

function replayRate() {
  return Number(byId("race-rate").value);
}

// How much of the text the first `tokens` tokens make. Inside a chunk characters are dealt out evenly.
function charactersAt(answer, tokens) {
  let before = { tokens: 0, characters: 0 };
  for (const chunk of answer.chunks) {
    if (chunk.tokens >= tokens) {
      const share = (tokens - before.tokens) / Math.max(1, chunk.tokens - before.tokens);
      return Math.round(before.characters + share * (chunk.characters - before.characters));
    }
    before = chunk;
  }
  return answer.text.length;
}

// The live lane's figures, all by the engine's clock: tokens, the seconds from the first to the last, and their speed.
function liveFigures(answer) {
  const last = answer.chunks.at(-1);
  const tokens = answer.usage?.completion_tokens ?? answer.timings?.predicted_n ?? last.tokens ?? 0;
  const engineMs = answer.timings?.predicted_ms ?? last.engineMs;
  const seconds = (engineMs ?? last.time - answer.firstAt) / 1000;
  return { tokens, seconds, speed: seconds > 0 && tokens > 1 ? (tokens - 1) / seconds : null };
}

function replayFigures(tokens, rate) {
  return { tokens, seconds: Math.max(0, tokens - 1) / rate, speed: rate };
}

function showLane(name, { text, tokens, seconds, speed, share }) {
  const box = byId(`lane-${name}-text`);
  if (box.textContent !== text) {
    box.textContent = text;
    box.scrollTop = box.scrollHeight;
  }
  byId(`lane-${name}-tokens`).textContent = count(tokens);
  byId(`lane-${name}-time`).textContent = seconds.toFixed(1);
  byId(`lane-${name}-speed`).textContent = speedText(speed);
  width(byId(`lane-${name}-bar`), share);
}

function drawRace(now) {
  const { answer } = race;
  if (answer?.firstAt == null) return race.running;
  const rate = replayRate();
  const live = answer.endAt == null;
  const figures = liveFigures(answer);
  const made = figures.tokens;
  const goal = live ? RACE_TOKENS : made;
  showLane("live", { ...figures, text: answer.text, share: made / goal });
  const elapsed = (now - answer.firstAt) / 1000;
  // A replay can only show tokens that exist: where the engine is slower than the replay, the replay waits for it.
  const due = Math.min(made, 1 + Math.max(0, Math.floor(elapsed * rate)));
  const replayed = (race.skipped || race.done) && !live ? made : due;
  const done = !live && replayed >= made;
  showLane("replay", {
    ...replayFigures(replayed, rate),
    text: done ? answer.text : answer.text.slice(0, charactersAt(answer, replayed)),
    share: replayed / goal,
  });
  if (done) showVerdict(figures, rate);
  race.done = done;
  return race.running || !done;
}

function runFrames() {
  requestAnimationFrame((now) => {
    race.drawing = drawRace(now);
    if (race.drawing) runFrames();
    else setRacing(false);
  });
}

// Made of the very figures that the lanes show, so that clock and verdict cannot differ.
function showVerdict(live, rate) {
  const { tokens, seconds, speed } = live;
  if (!speed) return;
  const factor = speed / rate;
  byId("verdict-line").textContent =
    `${count(tokens)} tokens: ${duration(seconds)} here, ${duration(replayFigures(tokens, rate).seconds)} at ` +
    `${rate} tok/s. ` +
    (factor >= 1
      ? `${factor.toFixed(1)} times as fast as the replay.`
      : `The replay is ${(1 / factor).toFixed(1)} times as fast.`);
  byId("far-replay-name").textContent = `replayed at ${rate} tok/s`;
  byId("far-live").textContent = duration(FAR / speed);
  byId("far-replay").textContent = duration(FAR / rate);
  width(byId("far-live-bar"), Math.min(1, rate / speed));
  width(byId("far-replay-bar"), Math.min(1, speed / rate));
  byId("verdict").hidden = false;
}

function setRacing(running) {
  byId("race-start").textContent = running ? "Stop" : "Race";
}

async function startRun(text) {
  Object.assign(race, { answer: null, running: true, drawing: true, skipped: false, done: false });
  byId("verdict").hidden = true;
  for (const name of ["live", "replay"]) {
    showLane(name, {
      text: "",
      tokens: 0,
      seconds: 0,
      speed: name === "replay" ? replayRate() : null,
      share: 0,
    });
  }
  setRacing(true);
  runFrames();
  try {
    const answer = await ask(
      [{ role: "user", content: text }],
      { max_tokens: RACE_TOKENS, ignore_eos: true, ...settings() },
      (so_far) => {
        race.answer = so_far;
      },
    );
    race.answer = answer;
    if (answer.chunks.length) remember(answer);
    showInstruments(chat.last);
  } catch (error) {
    race.answer = error.answer?.chunks.length ? error.answer : null;
    showFailure(error);
  }
  race.running = false;
}

function startRace() {
  const rate = byId("race-rate");
  rate.addEventListener("input", () => {
    byId("race-rate-text").textContent = `${rate.value} tok/s`;
    byId("lane-replay-name").textContent = `the same tokens at ${rate.value} tok/s, not another engine`;
    byId("lane-replay-speed").textContent = rate.value;
    if (race.done) drawRace(performance.now()); // its clock and the verdict, at the new speed
  });
  byId("race-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (race.drawing) {
      race.skipped = true; // the replay jumps to its end
      return race.running && stop();
    }
    const text = byId("race-prompt").value.trim();
    if (!text) return byId("race-prompt").focus();
    hideFailure();
    startRun(text);
  });
}
