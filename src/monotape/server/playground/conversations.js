/* Conversations, kept in this browser. One is a tree: an edited question or another answer becomes a sibling, so nothing
   that was said is lost, and `chosen` says which way through the tree is shown.

   Beside every conversation lies a small entry for the list. Its revision tells when another tab has written. */

const ROOT = -1;
const UNTITLED = "New conversation";
const LONGEST_NAME = 80; // characters

// The beginning of a text, up to the end of a word where there is one.
function shortened(text) {
  if (text.length <= LONGEST_NAME) return text;
  const start = text.slice(0, LONGEST_NAME);
  const end = start.lastIndexOf(" ");
  return `${(end > LONGEST_NAME / 2 ? start.slice(0, end) : start.slice(0, -1)).trim()}…`;
}

class Conversation {
  constructor(given = {}) {
    this.id = given.id ?? crypto.getRandomValues(new Uint32Array(2)).join("-");
    this.title = given.title ?? null; // null: it is called after its first question
    this.created = given.created ?? Date.now();
    this.changed = given.changed ?? this.created;
    this.revision = given.revision ?? 0;
    this.nodes = given.nodes ?? []; // {parent, role, content, files, thoughts, summary}
    this.chosen = given.chosen ?? {}; // of each node, its child that is shown
    this.deleted = false; // an answer may still be on its way to one that is
  }

  // The indices of the nodes that are shown, first to last.
  path() {
    const found = [];
    for (let at = this.chosen[ROOT]; at !== undefined; at = this.chosen[at]) found.push(at);
    return found;
  }

  // The path up to a node and with it.
  pathTo(index) {
    const found = [];
    for (let at = index; at !== ROOT; at = this.nodes[at].parent) found.unshift(at);
    return found;
  }

  add(parent, node) {
    const index = this.nodes.push({ ...node, parent }) - 1;
    this.chosen[parent] = index;
    return index;
  }

  // Takes the newest node back, as if it had never been asked for; an older sibling is shown again.
  takeBack(before) {
    const { parent } = this.nodes.pop();
    if (before === undefined) delete this.chosen[parent];
    else this.chosen[parent] = before;
  }

  versions(index) {
    const { parent } = this.nodes[index];
    return this.nodes.flatMap((node, other) => (node.parent === parent ? [other] : []));
  }

  choose(index) {
    this.chosen[this.nodes[index].parent] = index;
  }

  name() {
    if (this.title) return this.title;
    const first = this.nodes.find((node) => node.role === "user");
    const text = first?.content || first?.files?.[0]?.name || "";
    return shortened(text.replace(/\s+/g, " ").trim()) || UNTITLED;
  }

  // Keeps it. Where another tab has written the same one meanwhile, this one goes on under a name of its own.
  save() {
    if (!this.nodes.length || this.deleted) return;
    const stored = lasting.get(`about.${this.id}`, null);
    if (stored && stored.revision !== this.revision) {
      this.id = new Conversation().id;
      memory.set("current", this.id);
    }
    this.revision += 1;
    this.changed = Date.now();
    const { id, created, changed, revision } = this;
    if (lasting.set(`conversation.${id}`, this))
      lasting.set(`about.${id}`, { title: this.name(), created, changed, revision });
    else this.revision -= 1; // what is stored is still the one before
  }
}

function loadConversation(id) {
  const found = id && lasting.get(`conversation.${id}`, null);
  return found ? healed(new Conversation(found)) : null;
}

/* An answer that has no end was under way when its page went. What had come of it stays; an answer of which nothing had
   come is taken back, and its question waits for another one. */
function healed(conversation) {
  const { nodes } = conversation;
  const last = nodes.at(-1);
  if (last?.role === "assistant" && !last.summary) {
    if (last.content || last.thoughts) last.summary = { figures: {}, finish: "reload" };
    else conversation.takeBack(conversation.versions(nodes.length - 1).at(-2));
  }
  return conversation;
}

// What the list shows, the newest first.
function listedConversations() {
  return lasting
    .names("about.")
    .map((id) => ({ id, ...lasting.get(`about.${id}`, {}) }))
    .sort((one, other) => (other.changed ?? 0) - (one.changed ?? 0));
}

function forgetConversation(id) {
  lasting.remove(`conversation.${id}`);
  lasting.remove(`about.${id}`);
}
