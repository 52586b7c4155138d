// The main thread: says what this browser is, takes jobs, runs each in a fresh worker, shows the
// figures and sends them back. Whatever came from outside is set as text, never as HTML.

const $ = (id) => document.getElementById(id);
const post = (to, body) =>
  fetch(to, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });

const cards = new Map();
const blobs = new Map(); // a model is fetched once, not once per configuration
let running = null;
let finished = 0;

function state(text, step = "", share = null) {
  $("state").textContent = text;
  $("step").textContent = step;
  $("bar").hidden = share === null;
  $("bar").value = share ?? 0;
}

/** The smallest step of the clock that can be seen, ns. */
function timerResolution() {
  let least = Infinity;
  const end = performance.now() + 50;
  for (let last = performance.now(), now = last; now < end; now = performance.now()) {
    if (now > last) least = Math.min(least, now - last);
    last = now;
  }
  return Number.isFinite(least) ? Math.round(least * 1e6) : null;
}

/** The graphics processor, or why there is none. A software one proves correctness, not speed. */
async function graphics() {
  if (!navigator.gpu) return { gpu: null, no_gpu: isSecureContext ? "the browser has no WebGPU" : "WebGPU needs https or localhost" };
  const adapter = await navigator.gpu.requestAdapter().catch(() => null);
  if (!adapter) return { gpu: null, no_gpu: "the browser gives no WebGPU adapter" };
  const { vendor, architecture, device, description } = adapter.info ?? {};
  const name = [vendor, architecture, device, description].filter(Boolean).join(" ") || "unnamed";
  const fallback = adapter.info?.isFallbackAdapter ?? adapter.isFallbackAdapter ?? false;
  const software = fallback || /swiftshader|llvmpipe|lavapipe|basic render|software/i.test(name);
  return { gpu: { name, software, fp16: adapter.features.has("shader-f16") }, no_gpu: null };
}

async function describe() {
  const wanted = ["model", "platform", "platformVersion", "architecture"];
  const hints = (await navigator.userAgentData?.getHighEntropyValues(wanted).catch(() => null)) ?? {};
  return {
    user_agent: navigator.userAgent,
    cross_origin_isolated: crossOriginIsolated,
    secure_context: isSecureContext,
    cpu_count: navigator.hardwareConcurrency ?? null,
    timer_resolution_ns: timerResolution(),
    platform: hints.platform || null,
    platform_version: hints.platformVersion || null,
    architecture: hints.architecture || null,
    model: hints.model || null,
    ...(await graphics()),
  };
}

function fact(name, value) {
  const [term, text] = [document.createElement("dt"), document.createElement("dd")];
  term.textContent = name;
  text.textContent = value;
  $("facts").append(term, text);
}

function showFacts(about) {
  fact("device", [about.model, about.platform, about.platform_version].filter(Boolean).join(" ") || "not told");
  fact("processors", about.cpu_count ?? "not told");
  fact("threads", about.cross_origin_isolated ? "allowed" : "one only: this page is not isolated");
  fact("WebGPU", about.gpu ? about.gpu.name + (about.gpu.software ? " (software)" : "") : about.no_gpu);
  fact("clock step", about.timer_resolution_ns === null ? "not told" : `${about.timer_resolution_ns / 1000} µs`);
}

async function fetched(url) {
  if (!blobs.has(url)) {
    const response = await fetch(url);
    if (!response.ok) throw new Error(`fetching the model: status ${response.status}`);
    blobs.set(url, await response.blob());
  }
  return blobs.get(url);
}

async function start(job) {
  running?.worker?.terminate(); // the computer gave up on it
  const mine = (running = { id: job.id, worker: null });
  const row = rowOf(job);
  state(job.label, "fetching the model", 0);
  try {
    const files = {};
    for (const [name, url] of Object.entries(job.files)) files[name] = await fetched(url);
    const rows = new Float32Array(await (await fetched(job.golden.rows)).arrayBuffer());
    if (running !== mine) return;
    const worker = (mine.worker = new Worker("worker.js", { type: "module" }));
    const value = await new Promise((resolve, reject) => {
      worker.onmessage = ({ data }) => {
        if (data.error !== undefined) reject(new Error(data.error));
        else if (data.value !== undefined) resolve(data.value);
        else if (running === mine) state(job.label, data.text, data.share);
      };
      worker.onerror = (e) => reject(new Error(`the worker stopped: ${e.message ?? "no message"}`));
      worker.postMessage({ job: { ...job, golden: { ...job.golden, rows } }, files });
    });
    showFigures(row, job, value);
    await send(job, { id: job.id, error: null, ...value });
  } catch (error) {
    if (running !== mine) return showFailure(row, "given up: it took too long");
    showFailure(row, error.message);
    await send(job, { id: job.id, error: error.message });
  } finally {
    mine.worker?.terminate();
    if (running === mine) running = null;
    finished += 1;
    if (!running) state("waiting for the computer");
  }
}

async function send(job, body) {
  for (let wait = 500; wait < 9000; wait *= 2) {
    const response = await post("result", body).catch(() => null);
    if (response?.ok) return;
    if (response) return state("stopped", `the computer refused the result: ${await response.text()}`);
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
  state("stopped", "the computer does not answer");
}

/** The row of a configuration, one for all of its processes; rows of one engine stay together. */
function rowOf(job) {
  if (!cards.has(job.title)) {
    const card = document.createElement("article");
    const [title, about] = [document.createElement("h2"), document.createElement("p")];
    title.textContent = job.title;
    about.textContent = job.about;
    card.append(title, about);
    $("results").append(card);
    cards.set(job.title, card);
  }
  const rows = [...cards.get(job.title).querySelectorAll(".row")];
  const key = `${job.engine_label} ${job.workload_label}`;
  let row = rows.find((r) => r.dataset.key === key);
  if (row) return row;
  row = document.createElement("div");
  row.className = "row";
  row.dataset.key = key;
  row.values = [];
  for (const [name, text] of [["what", inWords(job.workload)], ["figure", "…"], ["engine", job.engine_label], ["unit", ""], ["why", ""]]) {
    const part = document.createElement("span");
    part.className = name;
    part.textContent = text;
    row.append(part);
  }
  cards.get(job.title).insertBefore(row, rows.find((r) => r.dataset.key > key) ?? null);
  return row;
}

/** "decode 32 tokens after 512" is what the computer's tables call tg32 @ d512. */
function inWords({ n_prompt, n_gen, n_depth }) {
  const parts = [n_prompt && `prefill ${n_prompt}`, n_gen && `decode ${n_gen}`].filter(Boolean);
  return `${parts.join(", ")} token${n_prompt + n_gen > 1 ? "s" : ""}${n_depth ? ` after ${n_depth}` : ""}`;
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length / 2;
  return sorted.length % 2 ? sorted[Math.floor(middle)] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** Tokens per second as the computer's table has them: decode 1 / TPOT, else prefill p / TTFT. */
function speed({ n_prompt, n_gen }, repetitions) {
  if (n_gen > 1) return { unit: "decode tok/s", value: 1e9 / median(repetitions.map((t) => (t.at(-1) - t.at(-n_gen)) / (n_gen - 1))) };
  if (n_prompt) return { unit: "prefill tok/s", value: (1e9 * n_prompt) / median(repetitions.map((t) => t[0])) };
  return { unit: "ms", value: median(repetitions.map((t) => t[0])) / 1e6 };
}

function showFigures(row, job, { samples }) {
  const { unit, value } = speed(job.workload, samples.repetitions);
  row.values.push(value);
  row.className = job.correctness_only ? "row unsaid" : "row";
  const shown = median(row.values);
  row.querySelector(".figure").textContent = job.correctness_only ? "correct" : shown.toFixed(shown < 100 ? 1 : 0);
  row.querySelector(".unit").textContent = job.correctness_only ? "" : unit;
  row.querySelector(".why").textContent = job.correctness_only
    ? "Correctness only: graphics are rendered in software, so its speed says nothing."
    : "";
}

function showFailure(row, why) {
  row.className = "row failed";
  row.querySelector(".unit").textContent = "";
  row.querySelector(".figure").textContent = "failed";
  row.querySelector(".why").textContent = why;
}

async function main() {
  const about = await describe();
  showFacts(about);
  const reply = await post("claim", about).catch(() => null);
  if (reply?.status === 409) return state("in use", "Another browser opened this link first. Start the bench again for a new link.");
  if (!reply?.ok) return state("not connected", "The computer does not answer; is the bench still running?");
  navigator.wakeLock?.request("screen").catch(() => {});
  state("waiting for the computer");
  const events = new EventSource("events");
  events.addEventListener("job", ({ data }) => {
    const job = JSON.parse(data);
    if (running?.id !== job.id) start(job); // sent again after a break in the connection
  });
  events.addEventListener("end", () => {
    events.close();
    state("done", `${finished} run${finished === 1 ? "" : "s"}; the computer has the figures.`, finished ? 1 : null);
    $("hint").textContent = "You may close this page.";
  });
  events.onerror = () => {
    if (events.readyState === EventSource.CLOSED) state("stopped", "The computer has stopped the bench.");
    else if (!running) state("reconnecting");
  };
}

main();
