// Two lanes with the same tokens: the live answer, and its replay at a speed that a slider chooses.

const FAR = 50000; // tokens of the extrapolation
const RACE_TOKENS = 600;

const race = { answer: null, running: false, drawing: false, skipped: false };

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
  const last = answer.chunks.at(-1);
  const made = last.tokens ?? 0;
  const live = answer.endAt == null;
  const goal = live ? RACE_TOKENS : made;
  showLane("live", {
    text: answer.text,
    tokens: made,
    seconds: (last.time - answer.firstAt) / 1000,
    speed: figuresOf(answer).speed,
    share: made / goal,
  });
  const elapsed = (now - answer.firstAt) / 1000;
  // A replay can only show tokens that exist: where the engine is slower than the replay, the replay waits for it.
  const replayed = race.skipped && !live ? made : Math.min(made, 1 + Math.floor(elapsed * rate));
  const done = !live && replayed >= made;
  showLane("replay", {
    text: answer.text.slice(0, charactersAt(answer, replayed)),
    tokens: replayed,
    seconds: done ? (made - 1) / rate : Math.min(elapsed, (replayed - 1) / rate + 1 / rate),
    speed: rate,
    share: replayed / goal,
  });
  if (done) showVerdict();
  return race.running || !done;
}

function runFrames() {
  requestAnimationFrame((now) => {
    race.drawing = drawRace(now);
    if (race.drawing) runFrames();
    else setRacing(false);
  });
}

function showVerdict() {
  const { answer } = race;
  const speed = figuresOf(answer).speed;
  const made = answer.chunks.at(-1).tokens;
  if (!speed || made < 2) return;
  const rate = replayRate();
  const [here, there] = [(made - 1) / speed, (made - 1) / rate];
  const factor = speed / rate;
  byId("verdict-line").textContent =
    `${count(made)} tokens: ${duration(here)} here, ${duration(there)} at ${rate} tok/s. ` +
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
  Object.assign(race, { answer: null, running: true, drawing: true, skipped: false });
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
    if (!race.running && race.answer) showVerdict();
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
