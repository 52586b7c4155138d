// The passes of device_bench/measure.py without Python: edgeqkv-bench JOB RESULT, one job and out.
//
// RESULT receives {"value": ...} or {"error": one line}; a process that writes none crashed.
// Progress goes to stderr, a line each that starts with "> ".
#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "job.h"
#include "memory.h"

static struct job job;
static long position;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static const float *append_tokens(const int64_t *ids, long n) {
  const float *logits = NULL;
  if (!job.n_tensors) position = 0;  // nothing is kept, so every input is a whole one
  if (position + n > job.capacity)
    fail("context overflow: %ld tokens held + %ld new exceed the context of %ld", position, n,
         job.capacity);
  while (n > 0) {
    long most = job.n_tensors ? runner_chunk(position) : n, step = n < most ? n : most;
    logits = runner_step(ids, step, position);
    position += step;
    ids += step;
    n -= step;
  }
  return logits;
}

static void reset(void) {
  runner_reset();
  position = 0;
}

// The prompt's logits, then those of each decoded token, against the reference. A device that
// computes another model must never report a speed.
static double check_golden(void) {
  double worst = 0;
  long rows = job.n_golden - job.golden_prompt + 1;
  reset();
  for (long row = 0; row < rows; row++) {
    const float *got = row ? append_tokens(job.golden_ids + job.golden_prompt + row - 1, 1)
                           : append_tokens(job.golden_ids, job.golden_prompt);
    const float *want = job.golden_logits + row * job.vocab;
    for (long i = 0; i < job.used; i++) {
      double difference = fabs((double)got[i] - want[i]);
      if (!(difference <= job.golden_limit))
        fail("parity: logit %ld of token %ld is %g, the reference %g; allowed difference %.2g", i,
             row, got[i], want[i], job.golden_limit);
      if (difference > worst) worst = difference;
    }
  }
  return worst;
}

static void run_once(int64_t *stamps) {
  const int64_t *ids = job.ids;
  reset();
  if (job.depth) append_tokens(ids, job.depth);
  ids += job.depth;
  int64_t start = now_ns();
  if (job.prompt) {
    append_tokens(ids, job.prompt);
    *stamps++ = now_ns() - start;
  }
  ids += job.prompt;
  for (long i = 0; i < job.gen; i++) {
    append_tokens(ids + i, 1);
    *stamps++ = now_ns() - start;
  }
}

static void print_stamps(const int64_t *stamps, long n) {
  print("[");
  for (long i = 0; i < n; i++) print("%s%lld", i ? ", " : "", (long long)stamps[i]);
  print("]");
}

static void check_fits(void) {
  long need = job.depth + job.prompt + job.gen;
  if (need > job.capacity)
    fail("the workload needs a context of %ld tokens, the bundle holds %ld; shorten it or export "
         "with a larger --max-context", need, job.capacity);
}

static void time_pass(void) {
  int64_t start = now_ns();
  int imported = runtime_import(&job);
  int64_t import_ns = now_ns() - start;
  start = now_ns();
  runner_open(&job);
  int64_t load_ns = now_ns() - start;
  check_fits();
  start = now_ns();
  append_tokens(job.ids, 1);
  int64_t first_call_ns = now_ns() - start;
  fprintf(stderr, "> checking the golden vectors\n");
  double worst = check_golden();
  long runs = job.warmup + job.repetitions, n = (job.prompt ? 1 : 0) + job.gen;
  int64_t *stamps = calloc(runs * n + 1, sizeof *stamps);
  if (!stamps) fail("out of memory");
  for (long i = 0; i < runs; i++) {
    fprintf(stderr, "> run %ld of %ld\n", i + 1, runs);
    run_once(stamps + i * n);
  }
  begin_value();
  print("{\"samples\": {\"import_ns\": ");
  if (imported) print("%lld", (long long)import_ns);
  else print("null");
  print(", \"load_ns\": %lld, \"first_call_ns\": %lld, \"warmup\": ", (long long)load_ns,
        (long long)first_call_ns);
  print_stamps(stamps, job.warmup * n);
  print(", \"golden_max_abs\": %.9g, \"repetitions\": [", worst);
  for (long i = job.warmup; i < runs; i++) {
    if (i > job.warmup) print(", ");
    print_stamps(stamps + i * n, n);
  }
  print("]}, \"engine\": \"%s\", \"interpreted\": false}", runtime_name());
  end_value();
}

static void print_snapshot(const char *name, const struct snapshot *s, int taken) {
  print(", \"%s\": ", name);
  if (!taken) {
    print("null");
    return;
  }
  print("{\"rss\": %ld, \"pss\": %ld, \"uss\": %ld, \"anonymous\": %ld, \"swap\": %ld, ", s->rss,
        s->pss, s->uss, s->anonymous, s->swap);
  print("\"file_clean\": %ld, \"private_dirty\": %ld}", s->file_clean, s->private_dirty);
}

static void memory_pass(void) {
  struct snapshot base, imported, loaded, prefilled, decoded;
  if (!snapshot(&base)) {
    begin_value();
    print("null");
    end_value();
    return;
  }
  int separate = runtime_import(&job);
  snapshot(&imported);
  runner_open(&job);
  check_fits();
  snapshot(&loaded);
  long filled = job.depth + job.prompt;
  if (filled) append_tokens(job.ids, filled);
  snapshot(&prefilled);
  for (long i = 0; i < job.gen; i++) append_tokens(job.ids + filled + i, 1);
  snapshot(&decoded);
  begin_value();
  print("{\"peak_rss\": %ld", peak_rss());
  print_snapshot("baseline", &base, 1);
  print_snapshot("after_import", &imported, separate);
  print_snapshot("after_load", &loaded, 1);
  print_snapshot("after_prefill", &prefilled, filled > 0);
  print_snapshot("after_decode", &decoded, job.gen > 0);
  print("}");
  end_value();
}

static void print_point(long tokens) {
  struct region regions[64];
  struct snapshot now;
  int n = runner_regions(regions, 64);
  long held = n < 0 ? -1 : resident_bytes(regions, n);
  if (!snapshot(&now)) fail("this kernel has no /proc/self/smaps_rollup");
  print("{\"tokens\": %ld, \"cache_bytes\": ", tokens);
  if (held < 0) print("null");
  else print("%ld", held);
  print(", \"process_bytes\": %ld}", now.private_dirty + now.swap);
}

// Reached one decode step at a time: the process then holds the workspace of decoding.
static void depth_pass(void) {
  runtime_import(&job);
  runner_open(&job);
  begin_value();
  print("[");
  append_tokens(job.ids, 1);  // depth 0 too is read with the workspace that a step leaves
  reset();
  for (size_t i = 0; i < job.n_depths; i++) {
    if (job.depths[i] > (long)job.n_ids) fail("job: too few ids for the depth pass");
    while (position < job.depths[i]) append_tokens(job.ids + position, 1);
    if (i) print(", ");
    print_point(job.depths[i]);
    fprintf(stderr, "> memory at depth %ld\n", job.depths[i]);
  }
  print("]");
  end_value();
}

static void capacity_pass(void) {
  runtime_import(&job);
  runner_open(&job);
  append_tokens(job.ids, job.capacity);
  begin_value();
  print("[");
  print_point(job.capacity);
  print("]");
  end_value();
}

static void pin(void) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (size_t i = 0; i < job.n_cores; i++)
    if (job.cores[i] < CPU_SETSIZE) CPU_SET(job.cores[i], &set);
  if (job.n_cores && sched_setaffinity(0, sizeof set, &set))
    fail("--cores: this device cannot run on the CPUs asked for: %s", strerror(errno));
}

int main(int argc, char **argv) {
  if (argc != 3) {
    fputs("usage: edgeqkv-bench JOB RESULT\n", stderr);
    return 2;
  }
  die_with_parent();
  read_job(argv[1], argv[2], &job);
  if (job.limit_s) alarm(job.limit_s);  // whoever waits for us may have gone
  pin();
  if (strcmp(job.pass, "time")) page_granular();
  if (!strcmp(job.pass, "time")) time_pass();
  else if (!strcmp(job.pass, "memory")) memory_pass();
  else if (!strcmp(job.pass, "depth")) depth_pass();
  else if (!strcmp(job.pass, "capacity")) capacity_pass();
  else fail("job: unknown pass '%s'", job.pass);
  fflush(NULL);
  _exit(0);  // the measurement is over and safe; nothing is gained by tearing a runtime down
}
