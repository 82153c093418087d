// Turns what the server measured into numbers to show. Nothing is guessed: what was not measured is null.

const DASH = "–";

function count(value) {
  return value == null ? DASH : Math.round(value).toLocaleString("en-US");
}

function speedText(value) {
  if (value == null || !isFinite(value)) return DASH;
  return value >= 100 ? count(value) : value.toFixed(1);
}

function milliseconds(value) {
  if (value == null || !isFinite(value)) return DASH;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  if (value >= 100) return `${value.toFixed(0)} ms`;
  if (value >= 1) return `${value.toFixed(1)} ms`;
  return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} µs`;
}

function duration(seconds) {
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function bytes(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(2)} GB`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} MB`;
  if (value >= 1e3) return `${(value / 1e3).toFixed(1)} kB`;
  return `${value} B`;
}

// Tokens per second that reading alone allows, with so many positions in the KV.
function ceilingAt(positions) {
  const { bytes_per_token: cost, bandwidth_bytes_per_second: bandwidth } = server.info ?? {};
  return bandwidth && cost ? bandwidth / (cost.weights + positions * cost.kv_per_position) : null;
}

/* The figures of an answer, finished or not. Speed while it is being made is that of the last half second of the
   engine's clock; at the end it is the whole answer's. */
function figuresOf(answer) {
  const { timings, metrics, usage } = answer;
  const fresh = timings?.prompt_n ?? null;
  const cached =
    timings?.cache_n ?? usage?.prompt_tokens_details?.cached_tokens ?? answer.reading?.cache ?? null;
  const prompt =
    usage?.prompt_tokens ?? (fresh == null ? (answer.reading?.total ?? null) : fresh + (cached ?? 0));
  const produced = usage?.completion_tokens ?? timings?.predicted_n ?? null;
  const final = metrics?.decode_tokens_per_second ?? null;
  const details = usage?.completion_tokens_details;
  const accepted = timings?.draft_n_accepted ?? details?.accepted_prediction_tokens ?? null;
  const rejected = details?.rejected_prediction_tokens;
  return {
    prompt,
    fresh: fresh ?? (prompt == null ? null : prompt - (cached ?? 0)),
    cached,
    produced,
    accepted,
    drafted: timings?.draft_n ?? (rejected == null ? null : accepted + rejected),
    speed: final ?? liveSpeed(answer.chunks),
    ttft: metrics?.time_to_first_token_ms ?? null,
    seenTtft: answer.firstAt == null ? null : answer.firstAt - answer.sentAt,
    itl50: timings?.itl_p50_ms ?? null,
    itl99: timings?.itl_p99_ms ?? null,
    finished: final != null,
  };
}

function liveSpeed(chunks) {
  const last = chunks.at(-1);
  if (!last || last.engineMs == null) return null;
  let first = last;
  for (let index = chunks.length - 1; index >= 0 && last.engineMs - chunks[index].engineMs <= 500; index--) {
    first = chunks[index];
  }
  const elapsed = last.engineMs - first.engineMs;
  return elapsed > 0 ? (1000 * (last.tokens - first.tokens)) / elapsed : null;
}

// The middle of what the answer read: the context at half of its length.
function meanContext(figures) {
  return figures.prompt == null ? null : figures.prompt + (figures.produced ?? 0) / 2;
}
