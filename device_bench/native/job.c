// The job file: lines of "key value". Lists repeat their key. Token ids and logits are raw
// little-endian files that a line names; every target of ours is little-endian.
#define _GNU_SOURCE
#include "job.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *result_path;
static char *value;
static size_t value_length, value_room;

static void *checked(void *memory) {
  if (!memory) {
    fputs("out of memory\n", stderr);
    exit(3);
  }
  return memory;
}

static void write_result(const char *text) {
  char partial[4096];
  snprintf(partial, sizeof partial, "%s.partial", result_path);
  FILE *f = fopen(partial, "w");
  if (!f || fputs(text, f) < 0 || fclose(f) || rename(partial, result_path)) {
    fprintf(stderr, "the result could not be written: %s\n", strerror(errno));
    exit(3);
  }
}

void print(const char *format, ...) {
  for (;;) {
    va_list arguments;
    va_start(arguments, format);
    size_t room = value_room - value_length;
    int need = vsnprintf(value ? value + value_length : NULL, room, format, arguments);
    va_end(arguments);
    if ((size_t)need < room) {
      value_length += need;
      return;
    }
    value_room = 2 * value_room + need + 1;
    value = checked(realloc(value, value_room));
  }
}

static void print_string(const char *text) {
  print("\"");
  for (; *text; text++) {
    unsigned char c = *text;
    if (c == '"' || c == '\\')
      print("\\%c", c);
    else
      print("%c", c < 32 ? ' ' : c);
  }
  print("\"");
}

void begin_value(void) {
  value_length = 0;
  print("{\"value\": ");
}

void end_value(void) {
  print("}\n");
  write_result(value);
}

void fail(const char *format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "%s\n", text);
  value_length = 0;
  print("{\"error\": ");
  print_string(text);
  print("}\n");
  write_result(value);
  _Exit(0);
}

static void *read_file(const char *path, size_t size, size_t *count) {
  FILE *f = fopen(path, "rb");
  if (!f || fseek(f, 0, SEEK_END)) fail("%s: %s", path, strerror(errno));
  long nbytes = ftell(f);
  rewind(f);
  void *data = checked(malloc(nbytes + 1));
  if (nbytes < 0 || fread(data, 1, nbytes, f) != (size_t)nbytes || nbytes % size)
    fail("%s: cut short", path);
  fclose(f);
  *count = nbytes / size;
  return data;
}

static void append(char ***list, size_t *n, char *text) {
  *list = checked(realloc(*list, (*n + 1) * sizeof **list));
  (*list)[(*n)++] = text;
}

static long number(const char *key, const char *text) {
  char *end;
  errno = 0;
  long n = strtol(text, &end, 10);
  if (errno || end == text || *end || n < 0) fail("job: %s is '%s', not a number", key, text);
  return n;
}

void read_job(const char *path, const char *result, struct job *job) {
  result_path = result;
  memset(job, 0, sizeof *job);
  job->library = "";
  const struct {
    const char *key;
    const char **target;
  } texts[] = {{"pass", &job->pass},
               {"library", &job->library},
               {"model", &job->model},
               {"formulation", &job->formulation},
               {"cache_dtype", &job->cache_dtype}};
  const struct {
    const char *key;
    long *target;
  } numbers[] = {{"threads", &job->threads},
                 {"capacity", &job->capacity},
                 {"vocab", &job->vocab},
                 {"used", &job->used},
                 {"prefill_chunk", &job->prefill_chunk},
                 {"score_bytes", &job->score_bytes},
                 {"least_chunk", &job->least_chunk},
                 {"heads", &job->heads},
                 {"kv_heads", &job->kv_heads},
                 {"head_dim", &job->head_dim},
                 {"itemsize", &job->itemsize},
                 {"depth", &job->depth},
                 {"prompt", &job->prompt},
                 {"gen", &job->gen},
                 {"warmup", &job->warmup},
                 {"repetitions", &job->repetitions},
                 {"limit_s", &job->limit_s},
                 {"golden_prompt", &job->golden_prompt}};
  size_t n_logits = 0, length = 0;
  char *line = NULL;
  FILE *f = fopen(path, "r");
  if (!f) fail("%s: %s", path, strerror(errno));
  for (ssize_t n; (n = getline(&line, &length, f)) > 0;) {
    if (line[n - 1] == '\n') line[n - 1] = 0;
    char *space = strchr(line, ' ');
    if (!space) fail("job: '%s' is not 'key value'", line);
    *space = 0;
    const char *key = line;
    char *text = checked(strdup(space + 1));
    int known = 1;
    if (!strcmp(key, "tensor")) append(&job->tensors, &job->n_tensors, text);
    else if (!strcmp(key, "scale")) append(&job->scales, &job->n_scales, text);
    else if (!strcmp(key, "output")) append(&job->outputs, &job->n_outputs, text);
    else if (!strcmp(key, "option")) append(&job->options, &job->n_options, text);
    else if (!strcmp(key, "ids")) job->ids = read_file(text, sizeof(int64_t), &job->n_ids);
    else if (!strcmp(key, "golden_ids"))
      job->golden_ids = read_file(text, sizeof(int64_t), &job->n_golden);
    else if (!strcmp(key, "golden_logits"))
      job->golden_logits = read_file(text, sizeof(float), &n_logits);
    else if (!strcmp(key, "golden_limit")) job->golden_limit = strtod(text, NULL);
    else if (!strcmp(key, "at")) {
      job->depths = checked(realloc(job->depths, (job->n_depths + 1) * sizeof(long)));
      job->depths[job->n_depths++] = number(key, text);
    } else if (!strcmp(key, "core")) {
      job->cores = checked(realloc(job->cores, (job->n_cores + 1) * sizeof(long)));
      job->cores[job->n_cores++] = number(key, text);
    } else known = 0;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
      if (!strcmp(key, texts[i].key)) *texts[i].target = text, known = 1;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
      if (!strcmp(key, numbers[i].key)) *numbers[i].target = number(key, text), known = 1;
    if (!known) fail("job: unknown key '%s'; runner and edgeqkv are of different versions", key);
  }
  fclose(f);
  free(line);
  if (!job->pass || !job->model || !job->formulation || !job->cache_dtype)
    fail("job: pass, model, formulation and cache_dtype are all needed");
  size_t rows = job->n_golden - job->golden_prompt + 1;
  if (job->golden_prompt < 1 || n_logits != rows * job->vocab)
    fail("job: %zu golden logits, expected %zu", n_logits, rows * job->vocab);
}
