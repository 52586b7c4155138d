// What the passes of bench.c need of a runtime; onnxruntime.c and executorch.cpp each give it.
#ifndef EDGEQKV_RUNNER_H
#define EDGEQKV_RUNNER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// One job, as device_bench/native/job.py wrote it: lines of "key value", see job.c.
struct job {
  const char *pass;         // time, memory, depth or capacity
  const char *library;      // the runtime's shared library; empty where it is linked
  const char *model;        // the bundle's entry file
  const char *formulation;  // gemm-prefix, gqa-aliased, full, plain-bmm
  const char *cache_dtype;  // fp32, fp16 or int8
  char **tensors;           // names of the cache tensors, in layer order
  char **scales;            // names of their scales where they are int8, float32 [kv_heads, capacity]
  char **outputs;           // what is appended to a tensor's name in "present.NAME", gqa-aliased
  char **options;           // session options, KEY=VALUE
  size_t n_tensors, n_scales, n_outputs, n_options;
  long threads, capacity, vocab, used, prefill_chunk, score_bytes, least_chunk;
  long heads, kv_heads, head_dim, itemsize;  // heads: of the queries
  long depth, prompt, gen, warmup, repetitions, limit_s;
  double golden_limit;  // largest difference of a logit that is still the same model
  long golden_prompt;   // how many of golden_ids are the prompt; the rest is decoded one by one
  int64_t *ids, *golden_ids;
  float *golden_logits;  // [1 + decoded, vocab]
  size_t n_ids, n_golden;
  long *depths;  // where the depth pass reads memory
  size_t n_depths;
  long *cores;  // CPUs to run on; all where there are none
  size_t n_cores;
};

struct region {
  uintptr_t start;
  size_t nbytes;
};

// Load the shared library. 0 where it was loaded with the program, so that there is nothing to time.
int runtime_import(const struct job *job);
const char *runtime_name(void);  // "onnxruntime 1.32.0 native", once imported

void runner_open(const struct job *job);
// Most tokens that one step takes when `past` are held.
long runner_chunk(long past);
// Append n tokens after `past`; the logits [vocab] of the last, until the next step.
const float *runner_step(const int64_t *ids, long n, long past);
void runner_reset(void);
// The memory that is the cache and nothing else; -1 where the runtime does not tell.
int runner_regions(struct region *regions, int room);

// Write {"error": ...} as the job's result and end the process.
#if defined(__GNUC__)
__attribute__((noreturn, format(printf, 1, 2)))
#endif
void fail(const char *format, ...);

#ifdef __cplusplus
}
#endif
#endif
