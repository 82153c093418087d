// Starts the page: tabs, keys, errors, and what the server says of itself.

const TABS = [...document.querySelectorAll('[role="tab"]')];

function openTab(tab, focus) {
  for (const other of TABS) {
    other.setAttribute("aria-selected", other === tab);
    other.tabIndex = other === tab ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = other !== tab;
  }
  if (focus) tab.focus();
  const name = tab.id.replace("tab-", "");
  memory.set("tab", name);
  if (name === "context") showPoints();
  if (name === "race") resize(byId("race-prompt"));
}

function startTabs() {
  TABS.forEach((tab, index) => {
    tab.addEventListener("click", () => openTab(tab));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: TABS.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      openTab(TABS[(to + TABS.length) % TABS.length], true);
    });
  });
  openTab(byId(`tab-${memory.get("tab", "chat")}`) ?? TABS[0]);
}

// What went wrong, in words, and what to do about it.
function advice(error) {
  if (error.status === 401)
    return ["This server needs a key.", "Enter the one it was started with. It stays in this tab."];
  const later = error.retryAfter ? ` It says to try again in ${error.retryAfter} s.` : "";
  if (error.status === 429)
    return ["The server is busy.", `It answers one request at a time, and its queue is full.${later}`];
  if (error.status === 503)
    return ["The engine is not ready.", `${error.message} It may still be loading, or be on its way back.`];
  if (error.code === "context_length_exceeded")
    return ["The conversation is too long.", `${error.message}. Start a new one, or shorten the message.`];
  if (error instanceof SettingError) return ["A setting makes no sense.", error.message];
  if (error.status) return [`The server refused (${error.status}).`, error.message];
  return [error.message, "What was written so far is kept. Try again in a moment."];
}

function showFailure(error) {
  const [title, text] = advice(error);
  if (error.status === 401) showNotice(title, text, null, keyForm());
  else showNotice(title, text);
}

// `action` is the label and the effect of a button; `form` stands in its place.
function showNotice(title, text, action = null, form = null) {
  const children = [element("strong", {}, title), element("span", {}, text)];
  const act = () => {
    hideFailure();
    action[1]();
  };
  if (action)
    children.push(element("button", { type: "button", class: "quiet boxed", onclick: act }, action[0]));
  children.push(
    form ?? element("button", { type: "button", class: "quiet boxed", onclick: hideFailure }, "Dismiss"),
  );
  byId("notice").replaceChildren(...children);
  byId("notice").hidden = false;
}

function hideFailure() {
  byId("notice").hidden = true;
}

function keyForm() {
  const field = element("input", {
    type: "password",
    "aria-label": "API key",
    autocomplete: "off",
    required: true,
  });
  return element(
    "form",
    {
      class: "key",
      onsubmit: (event) => {
        event.preventDefault();
        server.key = field.value.trim();
        memory.set("key", server.key);
        hideFailure();
        introduce();
      },
    },
    field,
    element("button", { class: "primary", type: "submit" }, "Use key"),
  );
}

let absent = false; // whether the notice is about a server that does not answer

async function introduce() {
  try {
    await loadInfo();
    showPlate();
    showDefaults();
    showStarters();
    byId("prompt").placeholder = server.info.completes ? "Begin some Python" : "Ask something";
    if (absent) hideFailure();
    absent = false;
  } catch (error) {
    absent = true;
    byId("plate").textContent =
      error.status === 401 ? "this server needs a key" : "the server does not answer";
    showFailure(error);
    if (error.status !== 401) setTimeout(introduce, 3000);
  }
  showInstruments(chat.last);
  showTimeline();
  showPoints();
  showConnect();
}

function startKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName ?? "");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      openTab(TABS[0]);
      byId("prompt").focus();
    }
  });
}

// A key in the address (/#key=...) is taken out of it at once, so that it is not shown or copied along.
function takeKey() {
  const found = location.hash.match(/^#key=(.+)$/);
  if (!found) return;
  server.key = decodeURIComponent(found[1]);
  memory.set("key", server.key);
  history.replaceState(null, "", location.pathname);
}

// Said once: every further attempt to keep something would fail the same way.
lasting.failed = () => {
  lasting.failed = null;
  showNotice(
    "This browser keeps no more.",
    "Its storage is full or switched off, so a reload may lose what comes now. Export and delete some conversations.",
  );
};

takeKey();
startTheme();
startTabs();
startKeys();
startSettings();
startAttach();
startScroll();
startPanel();
startList();
startExport();
startChat();
startRace();
startTimeline();
startContext();
startConnect();
introduce();
if (matchMedia("(pointer: fine)").matches) byId("prompt").focus();
