// The page: a chat whose answers can be taken apart. No state outlives it.

import { Api } from "./api.js";
import { element, showPages, showSpeed, showToken } from "./inside.js";

const CANDIDATES = 12;
const $ = (id) => document.getElementById(id);
const api = new Api();
const messages = []; // {role, content, tokens: [{text, trace}], prompt: ids or null, settings, cached}
let running = null;
let bound = 0;

// ---- settings

function settings() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  return {
    temperature: number("temperature"), top_k: number("top_k"), top_p: number("top_p"), min_p: number("min_p"),
    max_tokens: number("max_tokens"), seed: number("seed"),
  };
}

const isInside = () => $("show-inside").getAttribute("aria-pressed") === "true";

function tell(text, bad = false) {
  $("status").textContent = text;
  $("status").classList.toggle("bad", bad);
}

// ---- what is asked

function conversation(upTo) {
  const system = $("system").value.trim();
  const said = messages.slice(0, upTo).map(({ role, content }) => ({ role, content }));
  return system ? [{ role: "system", content: system }, ...said] : said;
}

async function answer() {
  const asked = { ...settings(), model: $("model").value, messages: conversation(messages.length) };
  const message = { role: "assistant", content: "", tokens: [], cached: 0, asked };
  messages.push(message);
  const view = { ...show(message), fresh: [], drawing: 0 };
  running = new AbortController();
  $("stop").disabled = false;
  $("send").disabled = true;
  tell("Reading the question …");
  const body = { ...asked, stream_options: { include_usage: true } };
  if (isInside()) body.trace = CANDIDATES;
  try {
    for await (const event of api.events("v1/chat/completions", body, running.signal)) take(event, message, view);
    tell("");
    if (isInside()) await measure();
  } catch (error) {
    tell(error.name === "AbortError" ? "Stopped." : error.message, error.name !== "AbortError");
  }
  draw(message, view);
  running = null;
  $("stop").disabled = true;
  $("send").disabled = false;
  view.article.querySelector(".actions").hidden = false;
  view.article.setAttribute("aria-busy", "false");
}

function take(event, message, view) {
  if (event.usage) {
    message.cached = event.usage.prompt_tokens_details.cached_tokens;
    view.drawing ||= requestAnimationFrame(() => draw(message, view));
  }
  const choice = event.choices[0];
  if (!choice) return;
  const trace = choice.trace?.[0];
  const text = choice.delta.reasoning_content ?? choice.delta.content ?? "";
  if (!text && !trace) return;
  message.content += choice.delta.content ?? "";
  const token = { text, trace };
  if (message.tokens.push(token) === 1) tell("Answering …");
  const span = element("span", { class: "token" }, text);
  if (trace) mark(span, token, message);
  view.fresh.push(span);
  view.drawing ||= requestAnimationFrame(() => draw(message, view));
}

// Show what has come: once a frame, since each time the browser lays out the whole answer.
function draw(message, view) {
  cancelAnimationFrame(view.drawing);
  view.drawing = 0;
  const box = $("messages");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  view.text.append(...view.fresh.splice(0));
  if (atEnd) box.scrollTop = box.scrollHeight;
  const last = message.tokens.findLast((token) => token.trace);
  if (!last) return;
  showSpeed($("speed"), last.trace.step, bound);
  showPages($("pages"), last.trace.step, message.cached);
}

// ---- tokens that can be looked at: one of an answer is in the order of the Tab key, arrows move between them

const marked = new WeakMap(); // from the element of a token to {token, message}

function mark(span, token, message) {
  const { text, trace } = token;
  const first = message.tokens.length === 1;
  if (first) message.cached = trace.step.first_position;
  if (text === "") { // the end, or a part of a character: shown, but no part of the text
    span.classList.add("silent");
    span.dataset.text = trace.text.includes("\ufffd") ? "·" : trace.text || "end";
  }
  if (trace.probability < 0.3) span.classList.add("unsure");
  span.setAttribute("role", "button");
  span.setAttribute("tabindex", first ? "0" : "-1");
  span.setAttribute("aria-label", `${text || span.dataset.text}, probability ${(100 * trace.probability).toFixed(0)} percent`);
  marked.set(span, { token, message });
}

function look({ target }) {
  const found = marked.get(target);
  if (found) inspect(target, found.token, found.message);
}

function walk(event) {
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  const next = step && marked.has(event.target) && event.target[step];
  if (!next) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function inspect(span, token, message) {
  if (!isInside() || span.classList.contains("chosen")) return;
  document.querySelectorAll(".token.chosen").forEach((other) => other.classList.remove("chosen"));
  span.classList.add("chosen");
  const asked = message.asked;
  showToken($("token"), token.trace, { temperature: asked.temperature ?? 1, top_k: asked.top_k ?? 0, top_p: asked.top_p ?? 1, min_p: asked.min_p ?? 0 },
    (knobs) => recompute(token, message, knobs));
  showSpeed($("speed"), token.trace.step, bound);
  showPages($("pages"), token.trace.step, message.cached);
}

// The same step once more: the tokens before it as a prompt, and one token drawn with other knobs.
async function recompute(token, message, knobs) {
  const { model } = message.asked;
  message.prompt ??= (await api.json("tokenize", { model, messages: message.asked.messages })).tokens;
  const before = message.tokens.slice(0, message.tokens.indexOf(token)).filter((t) => t.trace).map((t) => t.trace.token_id);
  const body = { model, prompt: [...message.prompt, ...before], max_tokens: 1, seed: 0, trace: CANDIDATES, ...knobs };
  const answered = await api.json("v1/completions", body);
  return answered.choices[0].trace[0];
}

// ---- messages

function show(message) {
  const mine = message.role === "user";
  const text = element("div", { class: "text" }, message.content);
  const actions = element("div", { class: "actions", hidden: !mine });
  const article = element("article", { class: message.role, "aria-busy": String(!mine) }, element("h3", {}, mine ? "You" : "Model"), text, actions);
  if (mine) actions.append(element("button", { type: "button", onclick: () => edit(message) }, "Edit"));
  else actions.append(element("button", { type: "button", onclick: () => retry(message) }, "Try again"));
  $("messages").append(article);
  $("messages").scrollTop = $("messages").scrollHeight;
  return { article, text };
}

function cutBefore(message) {
  const at = messages.indexOf(message);
  messages.length = at;
  [...$("messages").children].slice(at).forEach((article) => article.remove());
}

function edit(message) {
  if (running) return;
  cutBefore(message);
  $("question").value = message.content;
  $("question").focus();
}

function retry(message) {
  if (running) return;
  cutBefore(message);
  answer();
}

function ask() {
  const content = $("question").value.trim();
  if (!content || running) return;
  $("question").value = "";
  const message = { role: "user", content };
  messages.push(message);
  show(message);
  answer();
}

// ---- the beginning

async function begin() {
  try {
    const { data } = await api.json("v1/models");
    $("model").replaceChildren(...data.map(({ id }) => element("option", { value: id }, id)));
    tell("");
    await measure();
  } catch (error) {
    tell(error.message, true);
  }
}

async function measure() {
  bound = (await api.json("machine")).read_bytes_per_s;
}

function toggle(button, state, shown) {
  button.setAttribute(state, String(shown));
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
});
["mouseover", "click", "focusin"].forEach((kind) => $("messages").addEventListener(kind, look));
$("messages").addEventListener("keydown", walk);
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => { running?.abort(); messages.length = 0; $("messages").replaceChildren(); tell(""); $("question").focus(); });
$("key").addEventListener("change", () => { api.key = $("key").value.trim(); begin(); });
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("show-settings").addEventListener("click", () => {
  $("settings").hidden = !$("settings").hidden;
  toggle($("show-settings"), "aria-expanded", !$("settings").hidden);
});
function showInside(shown) {
  toggle($("show-inside"), "aria-pressed", shown);
  $("inside").hidden = !shown;
  document.querySelector("main").classList.toggle("with-inside", shown);
}
$("show-inside").addEventListener("click", () => showInside(!isInside()));
showInside(true);
begin();
