// One ONNX session on onnxruntime-web's CPU (wasm) build, driven as device_bench/runners/run_onnx.py
// drives the native one: the cache is one block of the wasm heap that this file owns, prefix views
// of it go in, and new rows are written right behind them.
//
// onnxruntime-web's own JavaScript copies every CPU input into the heap for each run and does not
// hand back outputs given in advance, so a cache would be copied at every token. The C functions
// that JavaScript calls (_OrtCreateTensor, _OrtRun) take addresses in the heap; here they are called
// directly. They are not a public interface: the package is pinned and checked by its hash.

const DTYPES = { fp32: 1, fp16: 10, int64: 7, int32: 6 };
const MODULE = "ort-wasm-simd-threaded.mjs";
const CPU = 1; // DataLocation of onnxruntime-web's api.cc
const OPTIMISE_ALL = 99;
const LOG_FATAL = 4;

export const CACHE_BINDING = {
  "gemm-prefix": "prefix views of one block, rows written in place",
  "gqa-aliased": "past and present are one block",
  full: "no cache",
};

/** Start the runtime; `watch` knows the memory that it makes. No model yet. */
export async function openRuntime(base, binary, threads, watch) {
  const module = await (await import(base + MODULE)).default({
    numThreads: threads,
    wasmBinary: binary,
    locateFile: (name) => base + name,
  });
  const memory = watch.object();
  check({ module, memory }, module._OrtInit(threads, LOG_FATAL), "start onnxruntime");
  return { module, memory, engine: "onnxruntime-web wasm" };
}

function check({ module }, failed, what) {
  if (!failed) return;
  const at = module._malloc(8);
  module._OrtGetLastError(at, at + 4);
  const text = module.getValue(at + 4, "*");
  throw new Error(`cannot ${what}: ${text ? module.UTF8ToString(text) : "no message"}`);
}

/** A loaded bundle. `files`: name -> Uint8Array of every file of the model. */
export async function openSession(runtime, bundle, files) {
  const { module } = runtime;
  for (const [name, bytes] of Object.entries(files)) {
    if (name !== bundle.entry) module.mountExternalData(name, bytes);
  }
  const model = files[bundle.entry];
  const at = module._malloc(model.length);
  if (!at) throw new Error(`out of memory: ${model.length} bytes for ${bundle.entry}`);
  new Uint8Array(runtime.memory.buffer).set(model, at);
  const options = module._OrtCreateSessionOptions(OPTIMISE_ALL, true, true, 0, false, 0, 0, LOG_FATAL, 0, 0);
  check(runtime, !options, "make session options");
  for (const [key, value] of Object.entries(bundle.session_config)) {
    const failed = module._OrtAddSessionConfigEntry(options, text(runtime, key), text(runtime, value));
    check(runtime, failed, `set ${key}`);
  }
  const session = await module._OrtCreateSession(at, model.length, options);
  check(runtime, !session, `load ${bundle.entry}`);
  module._OrtReleaseSessionOptions(options);
  module._free(at);
  module.unmountExternalData();
  return new Session(runtime, session, bundle);
}

/** A C string that lives as long as the runtime. */
function text({ module, memory }, string) {
  const bytes = new TextEncoder().encode(string + "\0");
  const at = module._malloc(bytes.length);
  new Uint8Array(memory.buffer).set(bytes, at);
  return at;
}

class Session {
  constructor(runtime, session, bundle) {
    Object.assign(this, { runtime, session, bundle, position: 0 });
    const { module } = runtime;
    this.logits = module._malloc(bundle.vocab_size * 4);
    this.ids = module._malloc(Math.max(bundle.prefill_chunk, bundle.cache.capacity) * 8);
    this.total = module._malloc(8);
    const { heads, head_dim, itemsize, capacity, names } = bundle.cache;
    this.row = head_dim * itemsize;
    this.segment = heads * capacity * this.row;
    this.block = names.length ? module._malloc(names.length * this.segment + 64) : 0;
    if (names.length && !this.block) throw new Error("out of memory for the cache");
    this.block = Math.ceil(this.block / 64) * 64;
    this.views = FORMULATIONS[bundle.formulation](this);
    this.fixed = [
      { name: "logits", type: DTYPES.fp32, address: this.logits, dims: [1, 1, bundle.vocab_size], nbytes: bundle.vocab_size * 4 },
    ];
    const { inputs, outputs } = this.describe(0, 1);
    this.inputNames = this.pointers(inputs.map((t) => text(runtime, t.name)));
    this.outputNames = this.pointers(outputs.map((t) => text(runtime, t.name)));
    this.inputValues = this.pointers(inputs.map(() => 0));
    this.outputValues = this.pointers(outputs.map(() => 0));
    this.dims = module._malloc(4 * 4);
  }

  pointers(values) {
    const at = this.runtime.module._malloc(values.length * 4);
    new Uint32Array(this.runtime.memory.buffer, at, values.length).set(values);
    return at;
  }

  describe(past, count) {
    const ids = { name: "input_ids", type: DTYPES.int64, address: this.ids, dims: [1, count], nbytes: count * 8 };
    const { inputs, outputs } = this.views(past, count);
    return { inputs: [ids, ...inputs], outputs: [...this.fixed, ...outputs] };
  }

  tensors(described, values) {
    const { module, memory } = this.runtime;
    const handles = described.map(({ name, type, address, dims, nbytes }) => {
      new Int32Array(memory.buffer, this.dims, dims.length).set(dims);
      const handle = module._OrtCreateTensor(type, address, nbytes, this.dims, dims.length, CPU);
      check(this.runtime, !handle, `bind ${name}`);
      return handle;
    });
    new Uint32Array(memory.buffer, values, handles.length).set(handles);
    return handles;
  }

  step(ids) {
    const { module, memory } = this.runtime;
    new BigInt64Array(memory.buffer, this.ids, ids.length).set(ids.map(BigInt));
    const { inputs, outputs } = this.describe(this.position, ids.length);
    const handles = [...this.tensors(inputs, this.inputValues), ...this.tensors(outputs, this.outputValues)];
    const failed = module._OrtRun(
      this.session, this.inputNames, this.inputValues, inputs.length,
      this.outputNames, outputs.length, this.outputValues, 0,
    );
    check(this.runtime, failed, "run the model");
    for (const handle of handles) module._OrtReleaseTensor(handle);
    this.position += ids.length;
  }

  reset() {
    this.position = 0;
  }

  /** Append ids; chunks as run_onnx.chunk_tokens does. */
  prefill(ids) {
    if (!this.bundle.cache.names.length) {
      this.position = 0;
      return this.step(ids);
    }
    for (let i = 0; i < ids.length; ) {
      const chunk = chunkTokens(this.bundle, this.position);
      this.step(ids.slice(i, i + chunk));
      i += chunk;
    }
  }

  decode(id) {
    this.step([id]);
  }

  /** The last token's logits, a copy. */
  read() {
    return new Float32Array(this.runtime.memory.buffer, this.logits, this.bundle.vocab_size).slice();
  }
}

/** Tokens that one prefill call takes at depth `past`: fewer as the rows of scores grow. */
export function chunkTokens({ prefill_chunk, num_attention_heads, score_bytes, least_chunk }, past) {
  const row = num_attention_heads * 4 * (past + prefill_chunk);
  return Math.min(prefill_chunk, Math.max(least_chunk, Math.floor(score_bytes / row)));
}

const FORMULATIONS = {
  full: () => () => ({ inputs: [], outputs: [] }),

  "gemm-prefix": (session) => {
    const { names, heads, head_dim, capacity, dtype } = session.bundle.cache;
    const { row, segment, block } = session;
    const type = DTYPES[dtype];
    const views = names.flatMap((name, i) =>
      Array.from({ length: heads }, (_, g) => ({
        past: `past.${name}.${g}`,
        present: `present.${name}.${g}`,
        address: block + i * segment + g * capacity * row,
      })),
    );
    return (past, count) => ({
      inputs: views.map((v) => ({ name: v.past, type, address: v.address, dims: [past, head_dim], nbytes: past * row })),
      outputs: views.map((v) => ({
        name: v.present, type, address: v.address + past * row, dims: [count, head_dim], nbytes: count * row,
      })),
    });
  },

  "gqa-aliased": (session) => {
    const { names, heads, head_dim, capacity, dtype, roles } = session.bundle.cache;
    const { segment, block, total, runtime } = session;
    const dims = [1, heads, capacity, head_dim];
    const suffixes = roles.length === 2 ? [""] : [".key", ".value"];
    const tensor = (name, i) => ({ name, type: DTYPES[dtype], address: block + i * segment, dims, nbytes: segment });
    const inputs = names.map((name, i) => tensor(`past.${name}`, i));
    const outputs = names.flatMap((name, i) => suffixes.map((suffix) => tensor(`present.${name}${suffix}`, i)));
    const length = { name: "total_sequence_length", type: DTYPES.int32, address: total, dims: [], nbytes: 4 };
    return (past, count) => {
      new Int32Array(runtime.memory.buffer, total, 1)[0] = past + count;
      return { inputs: [length, ...inputs], outputs };
    };
  },
};
