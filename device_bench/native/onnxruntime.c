// device_bench/runners/run_onnx.py in C: the cache is one anonymous mapping of ours that the session
// is bound to. The library is loaded when asked for, so that its cost is told from the program's.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runner.h"
#include "third_party/onnxruntime_c_api.h"

static const OrtApi *api;
static const struct job *job;
static OrtSession *session;
static OrtIoBinding *io;
static OrtMemoryInfo *cpu;
static float *logits;
// The cache is rows, and scales beside them where rows are int8; one segment per tensor, on a page.
struct part {
  char **names, *start;
  size_t n, row, stride;  // bytes of a token's row in one head, and of a segment
  int64_t dim;            // elements of a row [dim]; 0 where it is one number without an axis
  ONNXTensorElementDataType type;
};
static struct part parts[2];
static char *cache;
static size_t cache_bytes;
static int32_t total_length;
static char name_of_runtime[64];

static void check(OrtStatus *status, const char *what) {
  if (!status) return;
  char text[400];
  snprintf(text, sizeof text, "%s", api->GetErrorMessage(status));
  text[strcspn(text, "\n")] = 0;
  fail("%s: %s", what, text);
}

int runtime_import(const struct job *j) {
  void *library = dlopen(j->library, RTLD_NOW | RTLD_LOCAL);
  if (!library) fail("ONNX Runtime cannot be loaded: %s", dlerror());
  const OrtApiBase *(*base)(void) = (const OrtApiBase *(*)(void))dlsym(library, "OrtGetApiBase");
  if (!base) fail("%s is not ONNX Runtime: it has no OrtGetApiBase", j->library);
  api = base()->GetApi(ORT_API_VERSION);
  if (!api)
    fail("ONNX Runtime %s has no C API version %d; 1.21 or later is needed",
         base()->GetVersionString(), ORT_API_VERSION);
  snprintf(name_of_runtime, sizeof name_of_runtime, "onnxruntime %s native",
           base()->GetVersionString());
  return 1;
}

const char *runtime_name(void) { return name_of_runtime; }

static OrtValue *tensor(void *data, size_t nbytes, const int64_t *shape, size_t rank,
                        ONNXTensorElementDataType type) {
  OrtValue *value;
  check(api->CreateTensorWithDataAsOrtValue(cpu, data, nbytes, shape, rank, type, &value),
        "a tensor could not be bound");
  return value;
}

static void bind_input(const char *name, OrtValue *value) {
  check(api->BindInput(io, name, value), name);
  api->ReleaseValue(value);
}

static void bind_output(const char *name, OrtValue *value) {
  check(api->BindOutput(io, name, value), name);
  api->ReleaseValue(value);
}

static ONNXTensorElementDataType cache_type(void) {
  if (!strcmp(job->cache_dtype, "fp32")) return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  if (!strcmp(job->cache_dtype, "fp16")) return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
  if (!strcmp(job->cache_dtype, "int8")) return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
  fail("cache dtype '%s' is unknown to the native runner", job->cache_dtype);
}

// Prefix views in, the rows right after them out: bound anew as the context grows.
static void bind_part(const struct part *p, long past, long new) {
  int64_t before[2] = {past, p->dim}, after[2] = {new, p->dim};
  size_t rank = p->dim ? 2 : 1;
  char name[256];
  for (size_t i = 0; i < p->n; i++)
    for (long g = 0; g < job->kv_heads; g++) {
      char *rows = p->start + i * p->stride + g * job->capacity * p->row;
      snprintf(name, sizeof name, "past.%s.%ld", p->names[i], g);
      bind_input(name, tensor(rows, past * p->row, before, rank, p->type));
      snprintf(name, sizeof name, "present.%s.%ld", p->names[i], g);
      bind_output(name, tensor(rows + past * p->row, new * p->row, after, rank, p->type));
    }
}

// Past and present are the same memory, bound once; only the length changes.
static void bind_gqa(void) {
  int64_t shape[4] = {1, job->kv_heads, job->capacity, job->head_dim};
  const struct part *p = &parts[0];
  size_t nbytes = job->kv_heads * job->capacity * p->row;
  char name[256];
  for (size_t i = 0; i < p->n; i++) {
    char *rows = p->start + i * p->stride;
    snprintf(name, sizeof name, "past.%s", p->names[i]);
    bind_input(name, tensor(rows, nbytes, shape, 4, p->type));
    for (size_t k = 0; k < job->n_outputs; k++) {
      // "-" stands for nothing: a job has no empty values.
      const char *suffix = strcmp(job->outputs[k], "-") ? job->outputs[k] : "";
      snprintf(name, sizeof name, "present.%s%s", p->names[i], suffix);
      bind_output(name, tensor(rows, nbytes, shape, 4, p->type));
    }
  }
  bind_input("total_sequence_length", tensor(&total_length, sizeof total_length, NULL, 0,
                                             ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32));
}

static void open_cache(void) {
  size_t page = sysconf(_SC_PAGESIZE);
  parts[0] = (struct part){.names = job->tensors, .n = job->n_tensors, .dim = job->head_dim,
                           .row = job->head_dim * job->itemsize, .type = cache_type()};
  parts[1] = (struct part){.names = job->scales, .n = job->n_scales, .row = sizeof(float),
                           .type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT};
  for (int k = 0; k < 2; k++) {
    size_t segment = job->kv_heads * job->capacity * parts[k].row;
    parts[k].stride = (segment + page - 1) / page * page;
    cache_bytes += parts[k].stride * parts[k].n;
  }
  if (!cache_bytes) return;
  cache = mmap(NULL, cache_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (cache == MAP_FAILED) fail("no memory for a cache of %zu bytes", cache_bytes);
  madvise(cache, cache_bytes, MADV_NOHUGEPAGE);  // 2 MiB would be resident for the first token
  parts[0].start = cache;
  parts[1].start = cache + parts[0].stride * parts[0].n;
}

void runner_open(const struct job *j) {
  static const char *const known[] = {"gemm-prefix", "gqa-aliased", "full"};
  int found = 0;
  job = j;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++) found |= !strcmp(j->formulation, known[i]);
  if (!found) fail("formulation '%s' is unknown to the native runner", j->formulation);
  OrtEnv *env;
  OrtSessionOptions *options;
  check(api->CreateEnv(ORT_LOGGING_LEVEL_FATAL, "edgeqkv", &env), "ONNX Runtime");
  check(api->CreateSessionOptions(&options), "ONNX Runtime");
  check(api->SetIntraOpNumThreads(options, j->threads), "threads");
  check(api->SetInterOpNumThreads(options, 1), "threads");
  for (size_t i = 0; i < j->n_options; i++) {
    char *equals = strchr(j->options[i], '=');
    if (!equals) fail("job: option '%s' is not KEY=VALUE", j->options[i]);
    *equals = 0;
    check(api->AddSessionConfigEntry(options, j->options[i], equals + 1), "session option");
    *equals = '=';
  }
  check(api->CreateSession(env, j->model, options, &session), "the model cannot be loaded");
  api->ReleaseSessionOptions(options);
  check(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &cpu), "ONNX Runtime");
  check(api->CreateIoBinding(session, &io), "ONNX Runtime");
  logits = malloc(j->vocab * sizeof *logits);
  if (!logits) fail("out of memory");
  int64_t shape[3] = {1, 1, j->vocab};
  bind_output("logits", tensor(logits, j->vocab * sizeof *logits, shape, 3,
                               ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT));
  open_cache();
  if (!strcmp(j->formulation, "gqa-aliased")) bind_gqa();
}

// Fewer tokens as the rows of scores grow; the bound is run_onnx.py's.
long runner_chunk(long past) {
  long fitting = job->score_bytes / (job->heads * 4 * (past + job->prefill_chunk));
  if (fitting < job->least_chunk) fitting = job->least_chunk;
  return fitting < job->prefill_chunk ? fitting : job->prefill_chunk;
}

const float *runner_step(const int64_t *ids, long n, long past) {
  int64_t shape[2] = {1, n};
  // The runtime reads its inputs and never writes them.
  bind_input("input_ids",
             tensor((void *)ids, n * sizeof *ids, shape, 2, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64));
  total_length = past + n;
  if (!strcmp(job->formulation, "gemm-prefix"))
    for (int k = 0; k < 2; k++) bind_part(&parts[k], past, n);
  check(api->RunWithBinding(session, NULL, io), "the model failed");
  return logits;
}

void runner_reset(void) {
  if (cache_bytes) madvise(cache, cache_bytes, MADV_DONTNEED);
}

int runner_regions(struct region *regions, int room) {
  if (!cache_bytes || room < 1) return 0;
  regions[0].start = (uintptr_t)cache;
  regions[0].nbytes = cache_bytes;
  return 1;
}
