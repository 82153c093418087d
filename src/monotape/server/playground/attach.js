// Text files that go along with a question: chosen, dropped or pasted, and kept with what is being typed.

const LARGEST_FILE = 1 << 20; // bytes

const attached = { files: lasting.get("files", []) };

class FileError extends Error {}

// The text of a file, or a sentence about why it has none.
function fileText(name, buffer) {
  const bytesOf = new Uint8Array(buffer);
  const [first, second] = bytesOf;
  const encoding =
    first === 0xff && second === 0xfe ? "utf-16le" : first === 0xfe && second === 0xff ? "utf-16be" : "utf-8";
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(bytesOf);
    if (!text.includes("\0")) return text;
  } catch {
    // Bytes that are no text in this encoding.
  }
  throw new FileError(`${name} is not a text file. Only text in UTF-8 or UTF-16 can be attached.`);
}

async function takeFiles(list) {
  try {
    for (const file of list) {
      if (file.size > LARGEST_FILE)
        throw new FileError(
          `${file.name} has ${bytes(file.size)}. A file may have up to ${bytes(LARGEST_FILE)}.`,
        );
      const text = fileText(file.name, await file.arrayBuffer());
      if (!text.trim()) throw new FileError(`${file.name} is empty.`);
      attached.files.push({ name: file.name, text });
    }
  } catch (error) {
    const message = error instanceof FileError ? error.message : "The file cannot be read.";
    showNotice("Not attached.", message);
  }
  showFiles();
}

function setFiles(files) {
  attached.files = files;
  showFiles();
}

function fileChip(file, remove) {
  return element(
    "span",
    { class: "chip" },
    element("span", {}, file.name),
    element("small", {}, bytes(new Blob([file.text]).size)),
    remove &&
      element("button", { type: "button", "aria-label": `Remove ${file.name}`, onclick: remove }, "×"),
  );
}

function showFiles() {
  const { files } = attached;
  byId("files").hidden = !files.length;
  byId("files").replaceChildren(
    ...files.map((file) => fileChip(file, () => setFiles(files.filter((other) => other !== file)))),
  );
  lasting.set("files", files);
}

// A question as the model reads it: its files first, each in a fence that nothing in it can close.
function contentWithFiles({ content, files = [] }) {
  const parts = files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, content].filter(Boolean).join("\n\n");
}

function startAttach() {
  const picker = byId("file-picker");
  byId("attach").addEventListener("click", () => picker.click());
  picker.addEventListener("change", async () => {
    await takeFiles([...picker.files]);
    picker.value = ""; // or the same file could not be chosen twice
  });
  const view = byId("view-chat");
  view.addEventListener("dragover", (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    view.classList.add("dropping");
  });
  for (const name of ["dragleave", "drop"])
    view.addEventListener(name, (event) => {
      if (name === "drop" || !view.contains(event.relatedTarget)) view.classList.remove("dropping");
    });
  view.addEventListener("drop", (event) => {
    if (!event.dataTransfer?.files.length) return;
    event.preventDefault();
    takeFiles([...event.dataTransfer.files]);
  });
  byId("prompt").addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    takeFiles(files);
  });
  showFiles();
}
