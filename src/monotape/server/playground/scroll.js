// Following the answer: the conversation scrolls with it until the reader scrolls up, and again from its end on.

const NEAR = 48; // pixels from the end that still count as the end

const scroll = { following: true, last: 0 };

function distanceToEnd() {
  const log = byId("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight;
}

function follow() {
  const log = byId("log");
  if (scroll.following) log.scrollTop = log.scrollHeight;
  showNewest();
}

function followAgain() {
  scroll.following = true;
  follow();
}

function showNewest() {
  byId("newest").hidden = scroll.following || distanceToEnd() < NEAR;
}

/* The page itself only ever scrolls down, so whatever goes up is the reader; a shorter text also moves what is shown up,
   but leaves it at the end. */
function startScroll() {
  const log = byId("log");
  log.addEventListener(
    "scroll",
    () => {
      const up = log.scrollTop < scroll.last - 1;
      if (up && distanceToEnd() > 2) scroll.following = false;
      else if (!up && distanceToEnd() < NEAR) scroll.following = true;
      scroll.last = log.scrollTop;
      showNewest();
    },
    { passive: true },
  );
  // The wheel and a finger say what the reader wants before anything has moved.
  log.addEventListener("wheel", (event) => event.deltaY < 0 && leave(), { passive: true });
  byId("newest").addEventListener("click", followAgain);
  new ResizeObserver(follow).observe(log);
}

function leave() {
  const log = byId("log");
  if (log.scrollHeight > log.clientHeight && log.scrollTop > 0) scroll.following = false;
  showNewest();
}
