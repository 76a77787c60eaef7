"use strict";
/* The behaviour of the page: it sends prompts, shows the answers as they come, and keeps conversations in the browser. */
const at = (id) => document.getElementById(id);
const lost = "the connection to the server was lost; send again", prefix = "ggufspec:";  // of the browser's keys of conversations
const slowest = 300;           // ms; a block that takes longer is shown as its source
const DRAFTED = 1, THOUGHT = 2;  // bits of a piece's kind
let conversation = null;       // {id, changed, exchanges}; an exchange: {mode, prompt, images, pieces, note, failed, plain}
let answers = new Map();       // the element of each exchange's answer
let running = null;            // an AbortController while a text is generated
let editing = false;           // the next message replaces the last exchange
let speeds = {};               // tokens/s of the last texts of a prompt, with and without speculation

function make(parent, tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  if (tag === "button") made.type = "button";
  parent.append(made);
  return made;
}

// -- What is shown

const written = (exchange) => exchange.pieces.filter(([kind]) => !(kind & THOUGHT)).map(([, text]) => text).join("");

function show(exchange) {
  const chat = exchange.mode === "chat", frame = make(at("texts"), "article", "exchange");
  const turn = make(frame, "div", "turn");
  make(turn, "span", "role", chat ? "you" : "text");
  showImages(turn, exchange.images);
  make(turn, chat ? "div" : "span", chat ? "prompt asked" : "prompt", exchange.prompt);
  if (chat) make(make(turn, "div", "controls"), "button", "edit of-last", "Edit");
  const answer = chat ? make(frame, "div", "turn") : turn;
  if (chat) make(answer, "span", "role", "model");
  answers.set(exchange, make(answer, chat ? "div" : "span", "answer"));
  make(answer, "span", "note");
  const controls = make(answer, "div", "controls");
  make(controls, "button", "copy", "Copy").setAttribute("aria-label", "Copy answer");
  make(controls, "button", "again of-last", "Regenerate");
  if (!chat) make(controls, "button", "edit of-last", "Edit");
  paint(exchange);
}

function draw() {
  answers = new Map();
  at("texts").replaceChildren();
  at("texts").classList.toggle("drafts", at("drafts").checked);
  conversation.exchanges.forEach(show);
  at("texts").scrollTop = at("texts").scrollHeight;
}

// Brings the shown answer up to date; pieces are only appended to.
function paint(exchange) {
  const answer = answers.get(exchange), {pieces} = exchange;
  if (!answer) return;  // another conversation is shown
  answer.nextSibling.textContent = exchange.note;
  answer.nextSibling.classList.toggle("alarm", Boolean(exchange.failed));
  if (exchange.mode === "text" || exchange.plain || at("drafts").checked) {
    answer.classList.add("source");
    for (let i = Math.max(0, answer.childElementCount - 1); i < pieces.length; i++) {
      const [kind, text] = pieces[i], name = (kind & THOUGHT ? "thought " : "") + (kind & DRAFTED ? "drafted" : "");
      const old = answer.children[i];
      if (!old) make(answer, "span", name, text); else if (old.textContent.length < text.length) old.textContent = text;
    }
    return;
  }
  const content = written(exchange);
  const thought = pieces.filter(([kind]) => kind & THOUGHT).map(([, text]) => text).join("");
  const body = answer.querySelector(":scope > .markdown") || make(answer, "div", "markdown");
  if (thought) {
    const details = answer.querySelector("details") || makeReasoning(answer, !content);
    if (content && !body.firstChild) details.open = false;
    if (details.lastChild.textContent !== thought) details.lastChild.textContent = thought;
  }
  try { markdown.show(body, content); } catch { showSource(exchange); }  // nested too deeply for the parser
}

function makeReasoning(answer, open) {
  const made = make(answer, "details");
  answer.prepend(made);
  make(made, "summary", "", "Reasoning");
  make(made, "div", "source");
  made.open = open;
  return made;
}

function showSource(exchange) {
  exchange.plain = true;
  answers.get(exchange).replaceChildren();
  paint(exchange);
}

let due = 0, pause = 0;
function repaint(exchange) {
  due ||= setTimeout(() => {
    const began = performance.now();
    due = 0;
    following(() => paint(exchange));
    const spent = performance.now() - began;
    pause = Math.max(80, 10 * spent);  // most of the processor is the model's
    if (spent > slowest && answers.has(exchange) && !exchange.plain) showSource(exchange);
  }, pause);
}

// Changes what is shown, and stays at its end if that was in view.
function following(change) {
  const texts = at("texts"), atEnd = texts.scrollHeight - texts.scrollTop - texts.clientHeight < 40;
  change();
  if (atEnd) texts.scrollTop = texts.scrollHeight;
}

function showFigures(report, prompt, plain) {
  at("speed").textContent = report.tokens_per_second.toFixed(1);
  at("accepted").textContent = report.n_drafted ? Math.round(100 * report.n_accepted / report.n_drafted) + " %" : "–";
  at("length").textContent = report.n_rounds ? Math.max(1, report.n_generated / report.n_rounds).toFixed(2) : "–";
  if (speeds.prompt !== prompt) speeds = {prompt};
  speeds[plain ? "plain" : "speculative"] = report.tokens_per_second;
  at("speedup").textContent = speeds.plain && speeds.speculative ? (speeds.speculative / speeds.plain).toFixed(2) : "–";
}

function summary(report, plain, reason) {
  const how = plain ? "plain" : "speculative", cut = reason === "length" ? "; cut at the maximum number of tokens" : "";
  const drafts = report.n_drafted ? `, ${report.n_accepted} of ${report.n_drafted} drafted tokens accepted` : "";
  return `${how}: ${report.n_generated} tokens at ${report.tokens_per_second.toFixed(1)} tokens/s${drafts}${cut}`;
}

// -- What the browser keeps: one key per conversation, so that two tabs do not overwrite each other's

function stored(key) {
  try {
    const found = JSON.parse(localStorage.getItem(key));
    return found && Array.isArray(found.exchanges) && found.exchanges.length ? found : null;
  } catch { return null; }  // not ours, or storage is switched off
}

function conversations() {
  let keys = [];
  try { keys = Object.keys(localStorage); } catch { /* switched off */ }
  return keys.filter((key) => key.startsWith(prefix)).map(stored).filter(Boolean).sort((a, b) => b.changed - a.changed);
}

function save(changed) {
  if (changed.deleted) return;
  changed.changed = Date.now();
  try { localStorage.setItem(prefix + changed.id, JSON.stringify(changed)); } catch {
    at("storage").textContent = "This conversation is not kept: the browser's storage is full or switched off. Delete conversations to make room.";
    at("storage").className = "note alarm";
  }
  if (changed === conversation && location.hash.slice(1) !== changed.id) history.replaceState(null, "", "#" + changed.id);
  showList();
}

const titleOf = (each) => each.exchanges[0].prompt.trim().split("\n")[0].slice(0, 80);

function showList() {
  at("list").replaceChildren();
  for (const each of conversations()) {
    const item = make(at("list"), "li"), link = make(item, "a", "", titleOf(each)), button = make(item, "button", "", "×");
    link.href = "#" + each.id;
    link.title = titleOf(each);
    if (each.id === conversation.id) link.setAttribute("aria-current", "page");
    button.setAttribute("aria-label", "Delete: " + titleOf(each));
    button.addEventListener("click", () => remove(each));
  }
}

function remove({id, exchanges}) {
  if (!confirm(`Delete the conversation “${titleOf({exchanges})}”?`)) return;
  localStorage.removeItem(prefix + id);
  if (id === conversation.id) {
    conversation.deleted = true;
    history.replaceState(null, "", "#");
    open();
  } else showList();
}

// Opens the conversation that the address names, or a new one.
function open() {
  if (running) running.abort();
  const id = location.hash.slice(1);
  conversation = id && stored(prefix + id)
    || {id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8), changed: 0, exchanges: []};
  edit(false);
  toggleList(false);
  draw();
  showList();
  focusPrompt(document.body);
}

function toggleList(shown) {
  document.body.classList.toggle("listed", shown);
  at("menu").setAttribute("aria-expanded", shown);
}

// -- The server

function headers() {
  const made = {"Content-Type": "application/json"};
  if (at("key").value) made.Authorization = "Bearer " + at("key").value;
  return made;
}

async function request(path, options) {
  try { return await fetch(path, options); } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(`no answer from ${location.origin}: the server has stopped, or cannot be reached. Start it, then send again`);
  }
}

async function failure(response) {
  if (response.status === 401) at("options").open = true;
  try { return (await response.json()).error.message; } catch { return "HTTP status " + response.status; }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {done, value} = await reader.read().catch((error) => { throw error.name === "AbortError" ? error : new Error(lost); });
    if (done) return;
    held += value;
    for (let end; (end = held.indexOf("\n\n")) >= 0; held = held.slice(end + 2)) {
      const frame = held.slice(0, end);
      if (!frame.startsWith("data: ")) continue;
      if (frame === "data: [DONE]") return;
      yield JSON.parse(frame.slice(6));
    }
  }
}

function add(exchange, kind, text) {
  const last = exchange.pieces.at(-1);
  if (last && last[0] === kind) last[1] += text; else exchange.pieces.push([kind, text]);
}

// Reads the answer of one request into the exchange. Throws if it does not end as it should.
async function receive(exchange, body, plain) {
  const chat = exchange.mode === "chat";
  const response = await request(chat ? "/v1/chat/completions" : "/v1/completions",
    {method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal});
  if (!response.ok) throw new Error(await failure(response));
  let began = 0, tokens = 0, rounds = 0;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0], report = event.ggufspec;
    const piece = chat ? choice.delta.content || "" : choice.text;
    const thought = chat && choice.delta.reasoning_content || "";
    const n = report.drafted.length, drafted = n > 0 && report.drafted.every(Boolean) ? DRAFTED : 0;
    if (thought) add(exchange, THOUGHT | drafted, thought);
    if (piece) add(exchange, drafted, piece);
    if (choice.finish_reason) {
      showFigures(report, exchange.prompt, plain);
      exchange.note = summary(report, plain, choice.finish_reason);
    } else if (n) {  // else the role, or more of the same tokens
      began ||= performance.now();
      if (!drafted) rounds += 1;
      tokens += n;
      const seconds = (performance.now() - began) / 1000;
      if (seconds > 0.2) at("speed").textContent = ((tokens - 1) / seconds).toFixed(1);
      if (rounds) at("length").textContent = (tokens / rounds).toFixed(2);
      repaint(exchange);
    }
  }
  if (!exchange.note) throw new Error(lost);
}

function bodyOf(exchange, earlier, plain) {
  const body = {
    stream: true, report_drafted: true, speculative: !plain,
    temperature: at("temperature").valueAsNumber, max_tokens: at("tokens").valueAsNumber,
  };
  if (exchange.mode === "text") return {...body, prompt: exchange.prompt};
  body.messages = earlier.filter((each) => each.mode === "chat" && written(each)).flatMap(
    (each) => [{role: "user", content: contentOf(each)}, {role: "assistant", content: written(each)}]);
  body.messages.push({role: "user", content: contentOf(exchange)});
  return body;
}

// Asks after the first n exchanges of the conversation; the others are replaced, if there is an answer.
async function ask(mode, prompt, images, n, again) {
  const asked = conversation, before = asked.exchanges, plain = !at("speculative").checked;
  const exchange = {mode, prompt, images, pieces: [], note: "", failed: false};
  asked.exchanges = [...before.slice(0, n), exchange];
  draw();
  running = new AbortController();
  setBusy(true);
  at("said").textContent = "generating";
  let message = "";
  try {
    await receive(exchange, bodyOf(exchange, before.slice(0, n), plain), plain);
  } catch (error) {
    exchange.failed = error.name !== "AbortError";
    message = exchange.note = exchange.failed ? error.message : "stopped";
  }
  if (exchange.pieces.length || !message) save(asked); else asked.exchanges = before;
  running = null;
  setBusy(false);
  if (asked !== conversation) return;
  at("said").textContent = message || written(exchange);
  if (asked.exchanges === before) {
    draw();
    make(at("texts"), "p", exchange.failed ? "note alarm" : "note", message);
    at("texts").scrollTop = at("texts").scrollHeight;
    if (!again) { at("prompt").value ||= prompt; setAttached(images); edit(n < before.length); }
  } else following(() => paint(exchange));
  focusPrompt();
}

// Not on a touch screen, where it would open the keyboard.
function focusPrompt(from = document.activeElement) {
  if (from === document.body && matchMedia("(pointer: fine)").matches) at("prompt").focus();
}

function setBusy(busy) {
  document.body.classList.toggle("busy", busy);
  at("stop").disabled = !busy;
  at("send").disabled = busy;
}

// -- What the reader does

function edit(started) { editing = started; at("editing").hidden = !started; }

function editLast({mode, prompt, images}) {
  edit(true);
  setAttached(images);
  at("form-of").value = mode;
  at("prompt").value = prompt;
  at("prompt").focus();
}

async function copy(text, button) {
  try { await navigator.clipboard.writeText(text); } catch {  // browsers have no clipboard over plain HTTP, localhost apart
    const area = make(document.body, "textarea", "hidden");
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = at("said").textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

at("form").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  const prompt = at("prompt").value, mode = at("form-of").value;
  if (running || !prompt.trim()) return;
  if (mode === "chat") at("prompt").value = "";
  const n = conversation.exchanges.length - editing;
  edit(false);
  ask(mode, prompt, mode === "chat" ? takeAttached() : [], n);
});
at("texts").addEventListener("click", ({target}) => {
  const exchange = [...answers.keys()][[...at("texts").children].indexOf(target.closest(".exchange"))];
  const names = target.classList;
  if (target.closest(".code") && names.contains("copy")) copy(target.closest(".code").querySelector("code").textContent, target);
  else if (names.contains("copy")) copy(written(exchange), target);
  else if (names.contains("edit")) editLast(exchange);
  else if (names.contains("again") && !running) ask(exchange.mode, exchange.prompt, exchange.images, conversation.exchanges.length - 1, true);
});
at("prompt").addEventListener("keydown", (pressed) => {
  if (pressed.key !== "Enter" || pressed.shiftKey || pressed.isComposing) return;
  pressed.preventDefault();
  at("form").requestSubmit();
});
document.addEventListener("keydown", (pressed) => {
  if (pressed.key !== "Escape") return;
  if (document.body.classList.contains("listed")) { toggleList(false); at("menu").focus(); }
  else if (running) running.abort();
  else if (editing) at("keep").click();
});
at("stop").addEventListener("click", () => running && running.abort());
at("keep").addEventListener("click", () => { edit(false); setAttached([]); at("prompt").value = ""; });
at("drafts").addEventListener("change", draw);
at("menu").addEventListener("click", () => toggleList(!document.body.classList.contains("listed")));
at("new").addEventListener("click", (clicked) => {
  clicked.preventDefault();
  if (location.hash) history.pushState(null, "", location.pathname);
  open();
});
addEventListener("hashchange", open);
addEventListener("storage", showList);
addEventListener("pagehide", () => { if (running && conversation.exchanges.at(-1).pieces.length) save(conversation); });

async function showModel() {
  let response;
  try {
    response = await request("/v1/models", {headers: headers()});
    if (!response.ok) throw new Error(await failure(response));
  } catch (error) { at("model").textContent = error.message; return; }
  const model = (await response.json()).data[0], facts = model.ggufspec;
  at("model").textContent = model.id + (facts.draft ? " with a draft model" : ", no draft model") + ", context " + facts.n_ctx.toLocaleString() + " tokens";
  offerImages(facts.images);
  at("form-of").options[0].disabled = !facts.chat;
  if (!facts.chat) at("form-of").value = "text";
}
at("key").addEventListener("change", showModel);
open();
showModel();
