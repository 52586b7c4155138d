// One ONNX session on onnxruntime-web's WebGPU provider, by its public interface. The cache lives in
// GPU buffers; logits come back to the CPU, which is what ends a token.
//
// With two tensors per layer past and present are one buffer. With one shared tensor the operator
// would write that buffer by two bindings of a dispatch, which WebGPU refuses: past and present are
// two buffers that change places, and a third takes what nobody reads. `cache_binding` says which.
// gemm-prefix starts with an empty prefix, and the provider cannot bind an empty tensor: not run.

const MODULE = "ort.webgpu.min.mjs";
const DTYPES = { fp32: "float32", fp16: "float16" };

/** How the cache is given to the runtime, for the record. */
export function bindingOf({ formulation, cache }) {
  if (formulation === "full") return "no cache";
  return cache.roles.length === 2
    ? "past and present are one GPU buffer"
    : "past and present are two GPU buffers that change places, the cache is written twice each step";
}

export async function openRuntime(base, binary) {
  const ort = await import(base + MODULE);
  ort.env.logLevel = "fatal";
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = base;
  ort.env.wasm.wasmBinary = binary;
  return { ort, engine: "onnxruntime-web webgpu" };
}

/** A loaded bundle. `files`: name -> Uint8Array of every file of the model. */
export async function openSession({ ort }, bundle, files) {
  const others = Object.keys(files).filter((name) => name !== bundle.entry);
  const session = await ort.InferenceSession.create(files[bundle.entry], {
    executionProviders: ["webgpu"],
    externalData: others.map((path) => ({ path, data: files[path] })),
    logSeverityLevel: 4,
  });
  const device = await ort.env.webgpu.device;
  return new Session(ort, session, device, bundle);
}

class Session {
  constructor(ort, session, device, bundle) {
    Object.assign(this, { ort, session, device, bundle, position: 0, logits: null });
    this.cache = FORMULATIONS[bundle.formulation](this);
  }

  buffer(nbytes) {
    const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
    return this.device.createBuffer({ size: Math.ceil(nbytes / 16) * 16, usage });
  }

  tensor(buffer, dims) {
    const dataType = DTYPES[this.bundle.cache.dtype];
    return this.ort.Tensor.fromGpuBuffer(buffer, { dataType, dims });
  }

  async step(ids) {
    const input_ids = new this.ort.Tensor("int64", BigInt64Array.from(ids, BigInt), [1, ids.length]);
    const { feeds, fetches } = this.cache.bind(this.position, ids.length);
    const outputs = await this.session.run({ input_ids, ...feeds }, { logits: null, ...fetches });
    this.logits = outputs.logits.data;
    this.cache.after();
    this.position += ids.length;
  }

  reset() {
    this.position = 0;
  }

  async prefill(ids) {
    if (!this.bundle.cache.names.length) this.position = 0;
    for (let i = 0; i < ids.length; ) {
      const chunk = this.bundle.cache.names.length ? this.bundle.chunk(this.position) : ids.length;
      await this.step(ids.slice(i, i + chunk));
      i += chunk;
    }
  }

  decode(id) {
    return this.step([id]);
  }

  read() {
    return Float32Array.from(this.logits);
  }
}

const FORMULATIONS = {
  full: () => ({ bind: () => ({ feeds: {}, fetches: {} }), after() {} }),

  "gqa-aliased": (session) => {
    const { names, heads, head_dim, itemsize, capacity, roles } = session.bundle.cache;
    const shared = roles.length === 1;
    const dims = [1, heads, capacity, head_dim];
    const make = () => session.buffer(heads * capacity * head_dim * itemsize);
    const unread = shared ? make() : null;
    const layers = names.map((name) => ({ name, now: make(), next: shared ? make() : null }));
    return {
      bind(past, count) {
        const feeds = { total_sequence_length: new session.ort.Tensor("int32", [past + count], []) };
        const fetches = {};
        for (const { name, now, next } of layers) {
          feeds[`past.${name}`] = session.tensor(now, dims);
          if (shared) {
            fetches[`present.${name}.key`] = session.tensor(next, dims);
            fetches[`present.${name}.value`] = session.tensor(unread, dims);
          } else {
            fetches[`present.${name}`] = session.tensor(now, dims);
          }
        }
        return { feeds, fetches };
      },
      after() {
        if (!shared) return;
        for (const layer of layers) [layer.now, layer.next] = [layer.next, layer.now];
      },
    };
  },
};
