// What the page remembers: `memory` as long as this tab is open, `lasting` as long as this browser keeps it.

const byId = (id) => document.getElementById(id);

const PREFIX = "monotape.";

class Store {
  constructor(name) {
    this.name = name;
    this.failed = null; // called when something could not be kept
  }

  // A browser may forbid storage altogether, and says so by throwing.
  get area() {
    try {
      return window[this.name];
    } catch {
      return null;
    }
  }

  get(name, fallback) {
    try {
      return JSON.parse(this.area.getItem(PREFIX + name)) ?? fallback;
    } catch {
      return fallback;
    }
  }

  // Whether it was kept: a full or forbidden storage means that a reload forgets.
  set(name, value) {
    try {
      this.area.setItem(PREFIX + name, JSON.stringify(value));
      return true;
    } catch {
      this.failed?.();
      return false;
    }
  }

  remove(name) {
    try {
      this.area.removeItem(PREFIX + name);
    } catch {
      // Nothing was kept there.
    }
  }

  // The names that begin so, without that beginning.
  names(beginning) {
    try {
      const whole = PREFIX + beginning;
      const found = Array.from({ length: this.area.length }, (_, index) => this.area.key(index));
      return found.filter((name) => name.startsWith(whole)).map((name) => name.slice(whole.length));
    } catch {
      return [];
    }
  }
}

const memory = new Store("sessionStorage");
const lasting = new Store("localStorage");
