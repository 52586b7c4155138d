// Reading a job, and writing its result.
#ifndef EDGEQKV_JOB_H
#define EDGEQKV_JOB_H

#include "runner.h"

void read_job(const char *path, const char *result, struct job *job);
// What is printed between the two becomes the "value" of the result, written whole or not at all.
void begin_value(void);
void end_value(void);
void print(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
