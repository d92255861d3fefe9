"use strict";
/** The conversation: questions, streamed answers, retries, and the record in this browser. */
const $ = (id) => document.getElementById(id);

const SEEDS = 2 ** 31;
const KEPT = "redrafter", FORM = 1;  // the record in the browser's storage, and the number of its form
const FIELDS = ["system", "temperature", "limit", "seed", "compare", "colours", "written", "theme"];
const EXAMPLES = [
  "Name three uses of a paper clip.",
  "Write a Python function that reverses a string.",
  "Compare tea and coffee in a table.",
];

let model = null;      // of /v1/models
let turns = [];        // { question, seed, answer, other, note, root }
let running = null;    // an AbortController while an answer comes
let editing = false;   // whether the next message replaces the last turn

const scroller = document.querySelector("main");
const view = {
  written: () => $("written").checked,
  colours: () => $("colours").checked,
  atEnd: () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 80,
  toEnd: () => { scroller.scrollTop = scroller.scrollHeight; },
};

// The server

const headers = () => ({
  "Content-Type": "application/json",
  ...($("key").value ? { Authorization: `Bearer ${$("key").value}` } : {}),
});

async function told(response) {
  const text = await response.text();
  try { return JSON.parse(text).error.message; } catch { return text || `HTTP ${response.status}`; }
}

async function connect() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await told(response));
    [model] = (await response.json()).data;
    $("model").className = "";
    $("model").textContent = `${model.id}, ${model.context_length} tokens of context` +
      (model.chat ? "" : "; it has no chat template, so it continues your text");
    $("model").title = $("model").textContent;
    $("system").disabled = !model.chat;
  } catch (error) {
    model = null;
    $("model").className = "fault";
    $("model").textContent = error.message;
  }
}

/** Yield the objects of a stream of server-sent events. */
async function* events(response) {
  const decoder = new TextDecoder();
  let waiting = "";
  const reader = response.body.getReader();
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    waiting += decoder.decode(read.value, { stream: true });
    const lines = waiting.split("\n\n");
    waiting = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
  throw new Error("The connection was closed before the end of the answer.");
}

/** The number in a field; undefined, which JSON leaves out, if the field is empty. */
const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));

function body(turn, speculation) {
  const messages = [];
  if (model.chat && $("system").value.trim()) messages.push({ role: "system", content: $("system").value });
  for (const one of turns) {
    messages.push({ role: "user", content: one.question });
    if (one === turn) break;
    messages.push({ role: "assistant", content: one.answer.text });
  }
  return JSON.stringify({
    model: model.id,
    ...(model.chat ? { messages } : { prompt: messages.map((one) => one.content).join("") }),
    temperature: number("temperature"),
    max_tokens: number("limit"),
    seed: turn.seed, speculation, stream: true, draft_trace: true,
  });
}

async function stream(turn, answer, speculation) {
  const path = model.chat ? "v1/chat/completions" : "v1/completions";
  const response = await fetch(path, {
    method: "POST", headers: headers(), body: body(turn, speculation), signal: running.signal,
  });
  if (!response.ok) throw new Error(await told(response));
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices;
    if (choice && choice.draft_trace) {
      answer.take(choice.draft_trace, choice.delta ? choice.delta.content ?? "" : choice.text);
    }
  }
}

// The conversation

/** Add a turn with an empty answer to the page. */
function begin(question, seed) {
  if (!turns.length) $("turns").replaceChildren();
  const turn = { question, seed, note: "", other: null, root: add($("turns"), "article") };
  add(turn.root, "div", "question", question).dir = "auto";
  turn.answers = add(turn.root, "div", "answers");
  turn.answer = new Answer(turn.answers, "Answer", view);
  turns.push(turn);
  return turn;
}

/** Add the second answer to a turn: the same seed, without a drafter. */
function beginOther(turn) {
  turn.other = new Answer(turn.answers, "Without a drafter", view);
  return turn.other;
}

function conclude(turn, note, fault = false) {
  turn.note = note;
  turn.fault = fault;
  if (note) add(turn.root, "div", fault ? "fault" : "verdict", note);
  offerActions();
}

/** Show the buttons for the last turn below it. */
function offerActions() {
  document.querySelectorAll(".actions").forEach((old) => old.remove());
  const last = turns.at(-1);
  if (!last) return;
  const actions = add(last.root, "div", "actions");
  for (const [name, act] of [["Try again", retry], ["Edit", edit]]) {
    const button = add(actions, "button", "quiet", name);
    button.type = "button";
    button.addEventListener("click", act);
  }
}

function welcome() {
  const box = add($("turns"), "div", "welcome");
  add(box, "p", "", "Ask something. Colours tell who proposed each token of the answer.");
  for (const example of EXAMPLES) {
    const button = add(box, "button", "quiet", example);
    button.type = "button";
    button.addEventListener("click", () => ask(example));
  }
}

/** Answer a message; `replaced` is the last turn if the message replaces it, else null. */
async function ask(question, seed = number("seed") ?? Math.floor(Math.random() * SEEDS), replaced = null) {
  if (running || !question.trim()) return;
  if (!model) await connect();
  if (!model) return;
  document.querySelectorAll(".failed").forEach((old) => old.remove());
  if (editing) replaced = turns.at(-1);
  stopEditing();
  if (replaced) turns.pop().root.remove();
  running = new AbortController();
  const turn = begin(question, seed);
  setRunning(true);
  view.toEnd();
  let note = "", fault = false;
  try {
    await stream(turn, turn.answer, true);
    if ($("compare").checked) {
      const other = beginOther(turn);
      await stream(turn, other, false);
      fault = other.shown !== turn.answer.shown;
      const ratio = other.speed ? `, at ${(turn.answer.speed / other.speed).toFixed(2)} times the speed` : "";
      note = fault ? `The texts differ with seed ${seed}.` : `The same text with seed ${seed}${ratio}.`;
    }
  } catch (error) {
    fault = error.name !== "AbortError";
    note = fault ? error.message : "Stopped.";
  }
  running = null;
  setRunning(false);
  if (turn.answer.tokens.length) {
    if ($("question").value === question) $("question").value = "";  // otherwise the next message is typed already
    const follow = view.atEnd();
    turn.answer.finish();
    if (turn.other) turn.other.finish();
    conclude(turn, note, fault);
    if (follow) view.toEnd();
  } else if (turns.at(-1) === turn) {  // restore the page, so that the message can be corrected
    turns.pop().root.remove();
    if (replaced) {
      turns.push(replaced);
      $("turns").append(replaced.root);
    }
    add($("turns"), "div", `failed ${fault ? "fault" : "verdict"}`, note);
    offerActions();
    view.toEnd();
  }
  keep();
  $("question").focus();
}

function setRunning(is) {
  $("turns").setAttribute("aria-busy", is);
  $("send").hidden = is;
  $("stop").hidden = !is;
  document.querySelectorAll(".actions button").forEach((button) => { button.disabled = is; });
}

/** Answer the last message again, with the next seed if a seed is set, else with a new random seed. */
function retry() {
  if (running || !turns.length) return;
  const last = turns.at(-1);
  ask(last.question, number("seed") === undefined ? undefined : (last.seed + 1) % SEEDS, last);
}

/** Put the last message into the input field, to be changed. */
function edit() {
  if (running || !turns.length) return;
  editing = true;
  $("question").value = turns.at(-1).question;
  turns.at(-1).root.classList.add("replaced");
  $("editing").hidden = false;
  $("question").focus();
}

function stopEditing() {
  if (editing && turns.length) turns.at(-1).root.classList.remove("replaced");
  editing = false;
  $("editing").hidden = true;
}

function reset() {
  if (running) running.abort();
  stopEditing();
  turns = [];
  $("turns").replaceChildren();
  welcome();
  keep();
  $("question").focus();
}

// What stays in this browser

const valueOf = (field) => (field.type === "checkbox" ? field.checked : field.value);

function keep() {
  const settings = Object.fromEntries(FIELDS.map((id) => [id, valueOf($(id))]));
  const kept = turns.map(({ question, seed, note, fault, answer, other }) => (
    { question, seed, note, fault, answer: answer.record, other: other && other.record }));
  try { localStorage.setItem(KEPT, JSON.stringify({ form: FORM, settings, turns: kept })); } catch { /* it is full, or off */ }
}

/** Show the stored conversation; a record that is broken or of another form is ignored. */
function recall() {
  let kept = null;
  try { kept = JSON.parse(localStorage.getItem(KEPT)); } catch { /* it is broken, or off */ }
  if (kept?.form !== FORM) kept = {};
  for (const [id, value] of Object.entries(kept.settings ?? {})) {
    if (!FIELDS.includes(id)) continue;
    if ($(id).type === "checkbox") $(id).checked = value;
    else $(id).value = value;
  }
  applySettings();
  try {
    for (const { question, seed, note, fault, answer, other } of kept.turns ?? []) {
      const turn = begin(question, seed);
      turn.answer.restore(answer);
      if (other) beginOther(turn).restore(other);
      conclude(turn, note, fault);
    }
  } catch {
    turns = [];
    $("turns").replaceChildren();
  }
  if (turns.length) view.toEnd();
  else welcome();
}

function applySettings() {
  document.documentElement.style.colorScheme = $("theme").value;
  document.querySelector(".legend").hidden = !$("colours").checked;
}

/** Copy text to the clipboard; pages without a secure address only have the old way. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = add(document.body, "textarea");
  area.value = text;
  area.select();
  document.execCommand("copy");
  area.remove();
}

// What is pressed

$("ask").addEventListener("submit", (event) => { event.preventDefault(); ask($("question").value); });
$("question").addEventListener("keydown", (event) => {
  if (event.key === "ArrowUp" && !$("question").value) { event.preventDefault(); edit(); }
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask($("question").value);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("settings").open) return;
  if (running) running.abort();
  else if (editing) $("cancel").click();
});
$("stop").addEventListener("click", () => running && running.abort());
$("cancel").addEventListener("click", () => { stopEditing(); $("question").value = ""; $("question").focus(); });
$("reset").addEventListener("click", reset);
$("open-settings").addEventListener("click", () => $("settings").showModal());
$("close-settings").addEventListener("click", () => $("settings").close());
$("settings").addEventListener("click", (event) => { if (event.target === $("settings")) $("settings").close(); });
$("settings").addEventListener("change", (event) => {
  applySettings();
  if (["colours", "written"].includes(event.target.id)) {
    for (const { answer, other } of turns) for (const one of [answer, other]) if (one) one.finish();
  }
  keep();
});
$("turns").addEventListener("click", async (event) => {
  const button = event.target.closest(".copy");
  if (!button) return;
  await copy(button.dataset.text);
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});
$("key").addEventListener("change", connect);
recall();
connect();
