// How other programs are pointed at this server, with its own address, model and context filled in.

const AGENTS = JSON.parse(byId("agents").textContent).agents;
const NO_KEY = "monotape";

function fill(lines) {
  const context = server.info?.context ?? 32768;
  const values = {
    url: location.origin + location.pathname.replace(/\/+$/, ""),
    model: server.info?.model ?? "MODEL",
    context,
    output: Math.max(1, Math.floor(context / 4)),
    key: server.key || NO_KEY,
  };
  return lines.join("\n").replace(/\{\{(\w+)\}\}/g, (_, name) => values[name]);
}

function showAgent(agent) {
  for (const pill of byId("agents-list").children)
    pill.setAttribute("aria-pressed", pill.dataset.agent === agent.id);
  memory.set("agent", agent.id);
  const steps = agent.steps.map((step) => {
    const text = fill(step.lines);
    return element("li", {}, element("p", {}, step.text), codeBlock(text, step.file ?? step.language));
  });
  byId("agent").replaceChildren(
    element(
      "div",
      { class: "card agent" },
      element("h3", {}, agent.title),
      element(
        "p",
        { class: "small" },
        `${agent.summary} It will use `,
        element("code", {}, agent.endpoint),
        ".",
      ),
      element("ol", { class: "steps" }, ...steps),
      ...agent.notes.map((note) => element("p", { class: "small" }, note)),
    ),
  );
}

function startConnect() {
  byId("agents-list").append(
    ...AGENTS.map((agent) =>
      element(
        "button",
        {
          type: "button",
          class: "pill",
          "data-agent": agent.id,
          "aria-pressed": "false",
          onclick: () => showAgent(agent),
        },
        agent.title,
      ),
    ),
  );
}

function showConnect() {
  showAgent(AGENTS.find((agent) => agent.id === memory.get("agent", null)) ?? AGENTS[0]);
}
