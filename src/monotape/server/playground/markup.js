// Builds elements, and shows an answer's text: paragraphs, lists, code and emphasis, never HTML from a model.

function element(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "circle", "line", "text", "g", "rect", "polyline", "title"].includes(tag);
  const made = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function inline(text) {
  const parts = text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/);
  return parts.filter(Boolean).map((part) => {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`"))
      return element("code", {}, part.slice(1, -1));
    if (part.length > 4 && part.startsWith("**") && part.endsWith("**"))
      return element("strong", {}, part.slice(2, -2));
    return part;
  });
}

function codeBlock(text, language) {
  const code = element("code", {}, text);
  const head = element(
    "div",
    { class: "code-head" },
    element("span", {}, language),
    copyButton(() => text, language || "code"),
  );
  return element("div", { class: "code" }, head, element("pre", { tabindex: "0" }, code));
}

function copyButton(text, what) {
  const button = element("button", { type: "button", class: "copy", "aria-label": `Copy ${what}` }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Press Ctrl C";
    setTimeout(() => (button.textContent = "Copy"), 1600);
  });
  return button;
}

// The clipboard proper needs a secure page; a plain http address of another machine gets the old way.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = element("textarea", { class: "hidden" });
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

function block(text) {
  const fence = text.match(/^```([^\n]*)\n?([\s\S]*?)(?:\n?```\s*)?$/);
  if (fence) return codeBlock(fence[2], fence[1].trim());
  const heading = text.match(/^#{1,6} (.+)$/);
  if (heading) return element("p", {}, element("strong", {}, ...inline(heading[1])));
  const lines = text.split("\n");
  for (const [tag, mark] of [
    ["ul", /^\s*[-*+] /],
    ["ol", /^\s*\d+[.)] /],
  ]) {
    if (!lines.every((line) => mark.test(line))) continue;
    return element(tag, {}, ...lines.map((line) => element("li", {}, ...inline(line.replace(mark, "")))));
  }
  return element("p", {}, ...inline(text));
}

// Blocks of a text: fenced code, lists, or what stands between empty lines. A fence that is still open is a block.
function blocks(text) {
  const found = [];
  let lines = [];
  let kind = "text";
  const close = () => {
    if (lines.length) found.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.split("\n")) {
    if (kind === "fence") {
      lines.push(line);
      if (/^```\s*$/.test(line)) {
        close();
        kind = "text";
      }
      continue;
    }
    const next = line.startsWith("```") ? "fence" : /^\s*([-*+]|\d+[.)]) /.test(line) ? "list" : "text";
    if (!line.trim() || next !== kind || /^#{1,6} /.test(line)) close();
    kind = next;
    if (line.trim()) lines.push(line);
    if (/^#{1,6} /.test(line)) close();
  }
  close();
  return found;
}

// Shows a growing text: only blocks that changed are made again, so a long answer costs no more than a short one.
class TextView {
  constructor(parent) {
    this.parent = parent;
    this.shown = [];
  }

  show(text) {
    const wanted = blocks(text);
    wanted.forEach((source, index) => {
      if (this.shown[index]?.source === source) return;
      const made = block(source);
      if (this.shown[index]) this.shown[index].node.replaceWith(made);
      else this.parent.append(made);
      this.shown[index] = { source, node: made };
    });
    for (const extra of this.shown.splice(wanted.length)) extra.node.remove();
  }
}
