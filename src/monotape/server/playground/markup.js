// Builds elements: the page's own, a block of code, and buttons that copy.

function element(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "circle", "line", "text", "g", "rect", "polyline", "title"].includes(tag);
  const made = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

// `shown` is the code as it is shown, where that is more than its text.
function codeBlock(text, language, shown = [text]) {
  const code = element("code", {}, ...shown);
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
