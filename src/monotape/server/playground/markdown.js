/* Shows an answer's Markdown. A model's words are hostile: its HTML is shown as text, what marked makes of the rest goes
   through DOMPurify, and the page's policy would run none of it anyway. */

const LONGEST_HIGHLIGHT = 60000; // characters of code; longer code is shown plain
const LONGEST_LINE = 6000; // characters of a paragraph in which emphasis and links are looked for
const DEEPEST = 32; // quotes and lists in each other
const REST = 4; // times what drawing took that must pass before it is drawn again, unless it was quick
const QUICK_MS = 12;
const CLEAN = {
  ALLOWED_TAGS:
    "p br hr strong em del code pre span ul ol li blockquote a h1 h2 h3 h4 h5 h6 table thead tbody tr th td".split(
      " ",
    ),
  ALLOWED_ATTR: ["href", "title", "start", "align", "class"],
  ADD_URI_SAFE_ATTR: ["align", "start"], // else they would have to look like addresses
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replace(/[&<>"']/g, (mark) => `&#${mark.charCodeAt(0)};`);

function highlighted(code, language) {
  if (!hljs.getLanguage(language) || code.length > LONGEST_HIGHLIGHT) return escaped(code);
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}

const renderer = {
  html: ({ text }) => escaped(text),
  // No picture is fetched: its address alone could carry a secret away. It stays a link that a reader may follow.
  image({ href, text }) {
    return `<a href="${escaped(href)}">${escaped(text || href)}</a>`;
  },
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  code({ text, lang }) {
    const language = (lang ?? "").trim().split(/\s/)[0];
    return `<pre title="${escaped(language)}"><code>${highlighted(text, language.toLowerCase())}</code></pre>`;
  },
};

// Lines stay lines: models write verse and addresses without the two blanks that Markdown wants.
const markdown = new marked.Marked({ gfm: true, breaks: true, renderer });

// Every class and every link of an answer is made here, so that a model can borrow neither the page's own looks nor its window.
DOMPurify.addHook("uponSanitizeAttribute", (node, found) => {
  if (found.attrName === "class") found.keepAttr = /^hljs-[\w-]+( [\w-]+_)*$/.test(found.attrValue);
});
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

function dressed(fragment) {
  for (const link of fragment.querySelectorAll("a:not([href])")) link.replaceWith(...link.childNodes);
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.querySelector("code") ?? pre;
    pre.replaceWith(codeBlock(code.textContent, pre.title, [...code.childNodes]));
  }
  for (const table of fragment.querySelectorAll("table")) {
    const scroller = element("div", { class: "scroller", tabindex: "0" });
    table.replaceWith(scroller);
    scroller.append(table);
  }
  return fragment;
}

/* Looking for marks takes time that grows with the square of a line's length and with the depth of a nest. A model that
   goes round in circles, or wants to freeze the page, writes both: beyond these bounds its text is shown as it is. */
class BoundedLexer extends marked.Lexer {
  depth = 0;

  blockTokens(source, tokens = [], clipped = false) {
    if (this.depth >= DEEPEST) {
      tokens.push({ ...plainToken(source), tokens: [plainToken(source)] });
      return tokens;
    }
    this.depth += 1;
    try {
      return super.blockTokens(source, tokens, clipped);
    } finally {
      this.depth -= 1;
    }
  }

  inlineTokens(source, tokens = []) {
    if (source.length <= LONGEST_LINE) return super.inlineTokens(source, tokens);
    tokens.push(plainToken(source));
    return tokens;
  }
}

const plainToken = (text) => ({ type: "text", raw: text, text, escaped: false });

function lexed(text) {
  try {
    return new BoundedLexer(markdown.defaults).lex(text);
  } catch {
    return [{ ...plainToken(text), failed: true }];
  }
}

function block(token) {
  const made = element("div", { class: "block" });
  try {
    if (token.failed) throw new Error("not understood");
    made.append(dressed(DOMPurify.sanitize(markdown.parser([token]), CLEAN)));
  } catch {
    made.append(element("p", { class: "plain-text" }, token.raw));
  }
  return made;
}

/* Shows a growing text. Only blocks that changed are made again, and blocks that have settled are not even read again,
   so that a long answer costs no more than a short one. The whole text is read once more when it is complete: a link
   may be defined after its use. */
class TextView {
  constructor(parent) {
    this.parent = parent;
    this.shown = [];
    this.begin();
  }

  begin() {
    this.settled = { characters: 0, blocks: 0 };
    this.restsUntil = 0;
  }

  show(given, complete = false) {
    const began = performance.now();
    if (began < this.restsUntil && !complete) return;
    this.draw(given, complete);
    const took = performance.now() - began;
    this.restsUntil = took > QUICK_MS ? began + REST * took : 0;
  }

  draw(given, complete) {
    const text = given.replace(/\r\n?/g, "\n");
    if (complete) this.begin();
    const tokens = lexed(text.slice(this.settled.characters));
    const links = complete && Object.keys(tokens.links ?? {}).length > 0;
    let characters = this.settled.characters;
    const visible = [];
    for (const token of tokens) {
      if (token.type !== "space" && token.type !== "def") visible.push({ token, characters });
      characters += token.raw.length;
    }
    visible.forEach(({ token }, index) => this.place(this.settled.blocks + index, token, links));
    for (const extra of this.shown.splice(this.settled.blocks + visible.length)) extra.node.remove();
    if (visible.length > 4) {
      this.settled.characters = visible.at(-2).characters;
      this.settled.blocks += visible.length - 2;
    }
  }

  place(index, token, anew) {
    const before = this.shown[index];
    if (before?.raw === token.raw && !anew) return;
    const node = block(token);
    if (before) before.node.replaceWith(node);
    else this.parent.append(node);
    this.shown[index] = { raw: token.raw, node };
  }
}
