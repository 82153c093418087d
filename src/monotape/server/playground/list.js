// The list of conversations: beside the chat where there is room, else a drawer over it.

function dateText(time) {
  const date = new Date(time);
  const today = new Date().toDateString() === date.toDateString();
  return today
    ? date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })
    : date.toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" });
}

function showList() {
  const wanted = byId("search").value.trim().toLowerCase();
  const found = listedConversations();
  const shown = found.filter(({ title }) => (title ?? "").toLowerCase().includes(wanted));
  byId("search").hidden = found.length < 6 && !wanted;
  byId("export-all").disabled = !found.length;
  byId("list").replaceChildren(...shown.map(listEntry));
  byId("list-empty").hidden = shown.length > 0;
  byId("list-empty").textContent = wanted
    ? "Nothing found."
    : "Conversations are kept here, in this browser.";
}

function listEntry({ id, title, changed }) {
  const open = element(
    "button",
    {
      type: "button",
      class: "open",
      "aria-current": id === chat.conversation.id ? "true" : null,
      onclick: () => openFromList(id),
    },
    element("span", {}, title),
    element("small", {}, dateText(changed)),
  );
  return element(
    "li",
    {},
    open,
    element(
      "button",
      {
        type: "button",
        class: "act rename",
        "aria-label": `Rename ${title}`,
        title: "Rename",
        onclick: (event) => rename(id, event.target.closest("li")),
      },
      "✎",
    ),
    element(
      "button",
      {
        type: "button",
        class: "act delete",
        "aria-label": `Delete ${title}`,
        title: "Delete",
        onclick: () => removeConversation(id),
      },
      "×",
    ),
  );
}

function openFromList(id) {
  showDrawer(false);
  if (id === chat.conversation.id) return;
  const found = loadConversation(id);
  if (found) openConversation(found);
  else showList();
}

// The conversation with this id: the one on the page is worked on as it is.
function conversationOf(id) {
  return id === chat.conversation.id ? chat.conversation : loadConversation(id);
}

function rename(id, entry) {
  const conversation = conversationOf(id);
  if (!conversation) return showList();
  const field = element("input", { type: "text", "aria-label": "Title", maxlength: 200 });
  field.value = conversation.name();
  let done = false;
  const end = (keep) => {
    if (done) return;
    done = true;
    if (keep) {
      conversation.title = field.value.trim() || null;
      conversation.save();
    }
    if (conversation === chat.conversation) showTitle();
    else showList();
  };
  field.addEventListener("blur", () => end(true));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") end(true);
    if (event.key !== "Escape") return;
    event.stopPropagation(); // or it would stop an answer too
    end(false);
  });
  entry.replaceChildren(field);
  field.select();
}

// Gone at once, and back with one click: a question before it would be answered without being read.
function removeConversation(id) {
  const conversation = conversationOf(id);
  if (!conversation) return showList();
  if (id === chat.conversation.id) openConversation(new Conversation());
  conversation.deleted = true;
  forgetConversation(id);
  showList();
  showNotice("Deleted.", conversation.name(), ["Undo", () => restore(conversation)]);
}

function restore(conversation) {
  conversation.deleted = false;
  conversation.save();
  openConversation(conversation);
}

function showDrawer(open) {
  byId("view-chat").classList.toggle("listing", open);
  byId("show-list").setAttribute("aria-expanded", open);
  if (open) byId("conversations").querySelector("button, input")?.focus();
}

function startList() {
  byId("show-list").addEventListener("click", () =>
    showDrawer(!byId("view-chat").classList.contains("listing")),
  );
  byId("veil").addEventListener("click", () => showDrawer(false));
  byId("conversations").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !byId("view-chat").classList.contains("listing")) return;
    event.stopPropagation(); // or it would stop an answer too
    showDrawer(false);
    byId("show-list").focus();
  });
  byId("search").addEventListener("input", showList);
  byId("new").addEventListener("click", () => {
    showDrawer(false);
    byId("clear").click();
  });
  // Another tab has saved a conversation. This tab shows the saved one, unless an answer or an edit is under way here.
  addEventListener("storage", (event) => {
    if (!event.key?.startsWith(`${PREFIX}about.`)) return;
    const { conversation } = chat;
    if (event.key === `${PREFIX}about.${conversation.id}` && !chat.sending) {
      const newer = lasting.get(`conversation.${conversation.id}`, null);
      if (newer && newer.revision !== conversation.revision) {
        chat.conversation = new Conversation(newer);
        showConversation();
      }
    }
    showList();
  });
}
