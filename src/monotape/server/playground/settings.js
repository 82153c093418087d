// How answers are sampled: every field of a request, kept as it is typed. An empty field leaves the choice to the model.

const FIELDS = [
  { name: "system", label: "System message", kind: "text", wide: true, empty: "none" },
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: "Top k", min: -1, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 10, step: 0.05 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, empty: "0" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, empty: "0" },
  { name: "max_tokens", label: "Longest answer", min: 1, step: 1, empty: "what fits" },
  { name: "min_tokens", label: "Shortest answer", min: 0, step: 1, empty: "0" },
  { name: "seed", label: "Seed", min: 0, step: 1, empty: "drawn" },
  { name: "stop", label: "Stop at", kind: "lines", empty: "none; one a line" },
  { name: "stop_token_ids", label: "Stop token ids", kind: "ids", empty: "none, as 2, 7" },
  { name: "logit_bias", label: "Logit bias", kind: "bias", empty: "none, as 15: -5, 7: 2" },
  { name: "ignore_eos", label: "Go on after the end", kind: "check" },
];
const WHOLE = new Set(["top_k", "max_tokens", "min_tokens", "seed"]);

const fieldId = (field) => field.name.replaceAll("_", "-");

class SettingError extends Error {}

// A text of a field as the request wants it.
const PARSERS = {
  lines: (text) => text.split("\n").filter((line) => line !== ""),
  ids: (text) =>
    text
      .split(/[\s,]+/)
      .filter(Boolean)
      .map((word) => {
        if (!/^\d+$/.test(word)) throw new SettingError(`"${word}" is no token id. Write ids as 2, 7.`);
        return Number(word);
      }),
  bias: (text) =>
    Object.fromEntries(
      text
        .split(/[\n,]+/)
        .filter((part) => part.trim())
        .map((part) => {
          const found = part.match(/^\s*(\d+)\s*:\s*([-+]?\d+(?:\.\d+)?)\s*$/);
          if (!found) throw new SettingError(`"${part.trim()}" is no bias. Write them as 15: -5, 7: 2.`);
          return [found[1], Number(found[2])];
        }),
    ),
};

function numberOf(field, input) {
  const value = input.value.trim() === "" ? NaN : Number(input.value);
  const low = field.min ?? -Infinity;
  const high = field.max ?? Infinity;
  const fits = value >= low && value <= high && (!WHOLE.has(field.name) || Number.isInteger(value));
  if (fits) return value;
  const kind = WHOLE.has(field.name) ? "a whole number" : "a number";
  const range = field.max === undefined ? `from ${low} on` : `from ${low} to ${high}`;
  throw new SettingError(`${field.label} must be ${kind} ${range}. Correct it in the settings, or clear it.`);
}

// The fields of a request; a field that makes no sense is an error with a sentence.
function settings() {
  const found = {};
  for (const field of FIELDS) {
    const input = byId(fieldId(field));
    if (field.name === "system") continue;
    if (field.kind === "check") {
      if (input.checked) found[field.name] = true;
    } else if (field.kind) {
      const value = PARSERS[field.kind](input.value);
      if (Object.keys(value).length) found[field.name] = value;
    } else if (input.value !== "" || input.validity.badInput) {
      found[field.name] = numberOf(field, input);
    }
  }
  return found;
}

function systemMessages() {
  const text = byId("system").value.trim();
  return text ? [{ role: "system", content: text }] : [];
}

function saveSettings() {
  const kept = {};
  for (const field of FIELDS) {
    const input = byId(fieldId(field));
    const value = field.kind === "check" ? input.checked : input.value;
    if (value) kept[field.name] = value;
  }
  lasting.set("settings", kept);
  const count = Object.keys(kept).length;
  byId("settings-count").textContent = count ? ` (${count})` : "";
}

function fieldInput(field) {
  const common = { id: fieldId(field), "data-setting": field.name, autocomplete: "off" };
  if (field.kind === "check") return element("input", { ...common, type: "checkbox" });
  if (field.kind === "lines" || field.kind === "text")
    return element("textarea", { ...common, rows: 1, placeholder: field.empty });
  if (field.kind) return element("input", { ...common, type: "text", placeholder: field.empty });
  const { min, max, step } = field;
  const bounds = { min, step: step ?? "any", ...(max === undefined ? {} : { max }) };
  return element("input", {
    ...common,
    type: "number",
    ...bounds,
    placeholder: field.empty ?? "model's own",
  });
}

// What the model's authors recommend stands in the empty fields.
function showDefaults() {
  for (const field of FIELDS) {
    const own = server.info?.sampling?.[field.name];
    if (own != null && !field.empty) byId(fieldId(field)).placeholder = `${own} (model)`;
  }
}

function startSettings() {
  const kept = lasting.get("settings", {});
  for (const field of FIELDS) {
    const input = fieldInput(field);
    if (field.kind === "check") input.checked = Boolean(kept[field.name]);
    else input.value = kept[field.name] ?? "";
    input.addEventListener("input", saveSettings);
    const shape = { class: field.kind === "check" ? "check" : field.wide ? "wide" : null };
    byId("fields").append(element("label", shape, element("span", {}, field.label), input));
  }
  byId("settings-reset").addEventListener("click", () => {
    for (const field of FIELDS) {
      const input = byId(fieldId(field));
      if (field.kind === "check") input.checked = false;
      else input.value = "";
    }
    saveSettings();
  });
  saveSettings();
}
