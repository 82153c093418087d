// The theme: the system's, or the one that was chosen here.

const THEMES = { auto: "as the system", light: "light", dark: "dark" };

function showTheme() {
  const theme = lasting.get("theme", "auto");
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").dataset.shows = theme;
  byId("theme").setAttribute("aria-label", `Theme: ${THEMES[theme] ?? theme}. Change it`);
  byId("theme").title = `Theme: ${THEMES[theme] ?? theme}`;
}

function startTheme() {
  byId("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    const next = (names.indexOf(lasting.get("theme", "auto")) + 1) % names.length;
    lasting.set("theme", names[next]);
    showTheme();
  });
  showTheme();
}
