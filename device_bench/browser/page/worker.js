// One configuration in one worker, as the bench runs one in a fresh process natively: load, one
// first call, the golden vectors, a warm-up, the repetitions. The main thread only draws.

import { mismatch } from "./parity.js";
import * as wasm from "./wasm.js";
import * as webgpu from "./webgpu.js";

const WASM_MODULES = {
  wasm: "ort-wasm-simd-threaded.wasm",
  webgpu: "ort-wasm-simd-threaded.asyncify.wasm",
};
const now = () => performance.now();
const ns = (ms) => Math.round(ms * 1e6);
const tell = (text, share) => postMessage({ text, share });

onmessage = async ({ data }) => {
  try {
    postMessage({ value: await run(data) });
  } catch (error) {
    postMessage({ error: oneLine(error) });
  }
};

function oneLine(error) {
  const text = typeof error === "number" ? `the runtime stopped (exception ${error})` : String(error?.message ?? error);
  return text.split("\n")[0].slice(0, 300) || "no message";
}

async function run({ job, files }) {
  const { bundle, workload, ids } = job;
  const memory = watchMemory();
  const base = new URL("./ort/", import.meta.url).href;
  tell("fetching the runtime", 0);
  const binary = await (await fetch(base + WASM_MODULES[job.engine])).arrayBuffer();
  const bytes = {};
  for (const [name, blob] of Object.entries(files)) bytes[name] = new Uint8Array(await blob.arrayBuffer());

  tell("starting the runtime", 0.05);
  let start = now();
  const runtime =
    job.engine === "wasm"
      ? await wasm.openRuntime(base, binary, workload.n_threads, memory)
      : await webgpu.openRuntime(base, binary);
  const import_ns = ns(now() - start);
  tell("loading the model", 0.1);
  start = now();
  const session =
    job.engine === "wasm"
      ? await wasm.openSession(runtime, bundle, bytes)
      : await webgpu.openSession(runtime, { ...bundle, chunk: (past) => wasm.chunkTokens(bundle, past) }, bytes);
  const load_ns = ns(now() - start);
  const heap_load_bytes = memory.bytes();
  start = now();
  await session.prefill(ids.slice(0, 1));
  session.read();
  const first_call_ns = ns(now() - start);

  tell("checking the numbers", 0.2);
  const wrong = await parity(session, job.golden, bundle);
  if (wrong) throw new Error(`parity: ${wrong}`);

  const count = workload.repetitions;
  const runs = [];
  for (let i = -1; i < count; i++) {
    tell(i < 0 ? "warming up" : `run ${i + 1} of ${count}`, 0.3 + (0.7 * (i + 1)) / (count + 1));
    runs.push(await once(session, workload, ids));
  }
  const [warmup, ...repetitions] = runs;
  return {
    engine: runtime.engine,
    samples: { import_ns, load_ns, first_call_ns, warmup, repetitions },
    heap_load_bytes,
    heap_bytes: memory.bytes(),
    cache_binding: job.engine === "wasm" ? wasm.CACHE_BINDING[bundle.formulation] : webgpu.bindingOf(bundle),
  };
}

/** Bytes of the largest WebAssembly.Memory made from here on; it grows and never shrinks. */
function watchMemory() {
  const made = [];
  const Memory = WebAssembly.Memory;
  WebAssembly.Memory = class extends Memory {
    constructor(limits) {
      super(limits);
      made.push(this);
    }
  };
  const largest = () => made.reduce((a, b) => (b.buffer.byteLength > (a?.buffer.byteLength ?? -1) ? b : a), null);
  return { object: largest, bytes: () => largest()?.buffer.byteLength ?? null };
}

/** Prefill, token by token after it, and token by token from a reset: all against the golden rows. */
async function parity(session, { prompt_ids, decode_ids, rows, vocab_size }, bundle) {
  const expected = [];
  for (let i = 0; i < rows.length; i += vocab_size) expected.push(rows.subarray(i, i + vocab_size));
  const judge = (way, got) => {
    const wrong = mismatch(got, expected, bundle.used_tokens, bundle.limits);
    return wrong && `${way}: ${wrong}`;
  };
  session.reset();
  await session.prefill(prompt_ids);
  const got = [session.read()];
  for (const id of decode_ids) {
    await session.decode(id);
    got.push(session.read());
  }
  const wrong = judge("prefill, then token by token", got);
  if (wrong || !bundle.cache.names.length) return wrong;
  session.reset();
  const single = [];
  for (const id of [...prompt_ids, ...decode_ids]) {
    await session.decode(id);
    single.push(session.read());
  }
  return judge("token by token, after reset", single.slice(prompt_ids.length - 1));
}

/** One repetition, as device_bench/measure.py times it: ns since its start, one per token. */
async function once(session, { n_depth, n_prompt }, ids) {
  session.reset();
  if (n_depth) await session.prefill(ids.slice(0, n_depth));
  const prompt = ids.slice(n_depth, n_depth + n_prompt);
  const stamps = [];
  const start = now();
  if (prompt.length) {
    await session.prefill(prompt);
    session.read();
    stamps.push(now() - start);
  }
  for (const id of ids.slice(n_depth + n_prompt)) {
    await session.decode(id);
    session.read();
    stamps.push(now() - start);
  }
  return stamps.map(ns);
}
