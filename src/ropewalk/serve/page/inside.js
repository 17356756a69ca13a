// The glass box: one token's distribution, the pages of the KV cache, and the speed beside the machine's bound.

const PAGE = 16;
const KNOBS = [
  ["temperature", "Temperature", 0, 2, 0.05],
  ["top_k", "Top-k", 0, 100, 1],
  ["top_p", "Top-p", 0, 1, 0.01],
  ["min_p", "Min-p", 0, 1, 0.01],
];

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const percent = (p) => (p >= 0.9995 ? "100 %" : p >= 0.0005 ? `${(100 * p).toFixed(1)} %` : p > 0 ? "< 0.1 %" : "0");
const gigabytes = (n) => (n >= 1e9 ? `${(n / 1e9).toFixed(2)} GB` : n >= 1e6 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e3).toFixed(1)} kB`);
const visible = (text) => (text === "" ? "∅" : text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣"));

function bar(share, label) {
  const inner = element("i");
  inner.style.width = `${Math.min(100, 100 * share)}%`;
  return element("div", { class: "bar", role: "img", "aria-label": label }, inner);
}

// ---- speed

export function showSpeed(box, step, bound) {
  const rate = step.read_bytes / step.seconds;
  const weights = Object.values(step.weight_bytes).reduce((a, b) => a + b, 0);
  const lines = [
    `${(step.batch_drawn / step.seconds).toFixed(1)} tokens/s in this ${step.phase} step of ${(1000 * step.seconds).toFixed(1)} ms`,
    `${gigabytes(weights)} of weights and ${gigabytes(step.cache_read_bytes)} of cache read: ${gigabytes(step.read_bytes / Math.max(1, step.batch_drawn))} a token`,
  ];
  box.replaceChildren(...lines.map((line) => element("p", { class: "meta" }, line)));
  if (bound) {
    const share = rate > bound ? "more than was measured, while something else ran" : percent(rate / bound);
    const said = `${gigabytes(rate)}/s of the ${gigabytes(bound)}/s that this machine's memory gives: ${share}`;
    box.append(bar(rate / bound, said), element("p", { class: "meta" }, said));
  }
  const groups = Object.entries(step.group_s).filter(([name]) => name !== "trace");
  const total = groups.reduce((sum, [, seconds]) => sum + seconds, 0);
  box.append(element("p", { class: "meta" }, groups.map(([name, s]) => `${name} ${percent(s / total)}`).join(" · ")));
}

// ---- pages

export function showPages(box, step, cached) {
  const tokens = step.first_position + step.n_tokens;
  const items = step.pages.map((page, i) => {
    const held = Math.max(0, Math.min(PAGE, tokens - PAGE * i));
    const shared = PAGE * (i + 1) <= cached;
    const title = `page ${page}: ${held} of ${PAGE} tokens${shared ? ", found in the prefix cache" : ""}`;
    const fill = element("i");
    fill.style.height = `${(100 * held) / PAGE}%`;
    return element("li", { class: shared ? "shared" : "", title }, fill);
  });
  const found = Math.floor(cached / PAGE);
  box.replaceChildren(
    element("p", { class: "meta" }, `${tokens} tokens in ${step.pages.length} pages of ${gigabytes(step.page_bytes)}` +
      (found ? `, ${found} of them shared with an earlier prompt (striped)` : "")),
    element("ul", { class: "page-map", "aria-label": `Pages of this answer: ${step.pages.length}` }, ...items),
    element("p", { class: "meta" }, `${step.pages_used} of ${step.pages_total} pages in use by all requests`),
    bar(step.pages_used / step.pages_total, `${step.pages_used} of ${step.pages_total} pages in use`),
  );
}

// ---- one token

export function showToken(box, token, settings, recompute) {
  const table = element("div", { class: "scroll" });
  const note = element("p", { class: "meta" });
  draw(table, note, token);
  const values = { ...settings };
  let waiting = 0;
  const change = (name, input, shown) => {
    values[name] = Number(input.value);
    shown.textContent = input.value;
    clearTimeout(waiting);
    waiting = setTimeout(async () => {
      note.textContent = "Computing this step again …";
      try {
        const again = await recompute(values);
        if (again) draw(table, note, again, token.token_id);
      } catch (error) {
        note.textContent = error.message;
      }
    }, 150);
  };
  const knobs = KNOBS.flatMap(([name, label, min, max, step]) => {
    const id = `knob-${name}`;
    const shown = element("output", { for: id }, String(values[name]));
    const input = element("input", { id, type: "range", min, max, step, value: values[name] });
    input.addEventListener("input", () => change(name, input, shown));
    return [element("label", { for: id }, label), input, shown];
  });
  box.replaceChildren(
    element("h2", {}, element("code", {}, visible(token.text)), ` token ${token.token_id}, position ${token.position}`),
    note, table,
    element("div", { class: "knobs", role: "group", "aria-label": "The same step with other knobs" }, ...knobs),
    element("p", { class: "hint" }, "Moving a knob computes the distribution of this very step again; the answer stays as it is."),
  );
}

function draw(table, note, token, original) {
  const last = token.stages.at(-1);
  note.textContent = token.stages.map((s) =>
    `${s.name}: ${s.n_candidates} left, ${s.entropy.toFixed(2)} nats${s.n_removed ? `, −${s.n_removed} (${percent(s.removed_probability)})` : ""}`).join(" → ");
  const head = element("tr", {}, element("th", { scope: "col" }, "token"), ...token.stages.map((s) => element("th", { scope: "col" }, s.name)));
  const rows = token.candidates.map((c) => {
    const cells = c.probabilities.map((p, i) => {
      const cut = p === 0;
      return element("td", { class: cut ? "cut" : "" }, percent(p), p > 0 && i === c.probabilities.length - 1 ? bar(p, "") : "");
    });
    const drawn = c.token_id === (original ?? token.token_id);
    return element("tr", { class: drawn ? "drawn" : "" },
      element("td", {}, element("code", {}, visible(c.text)), drawn ? " ←" : ""), ...cells);
  });
  table.replaceChildren(element("table", {},
    element("caption", { class: "hidden-label" }, `Candidates before and after each knob; ${last.n_candidates} could be drawn`),
    element("thead", {}, head), element("tbody", {}, ...rows)));
}
