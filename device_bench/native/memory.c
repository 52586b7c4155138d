#define _GNU_SOURCE
#include "memory.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

// Bits of /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst in the kernel).
#define PRESENT (1ull << 63)
#define SWAPPED (1ull << 62)
#define FILE_OR_SHARED (1ull << 61)
#define EXCLUSIVE (1ull << 56)

// Value of "Name:   123 kB" in bytes; -1 without such a line.
static long field(const char *path, const char *name) {
  char line[256];
  long found = -1, kib;
  FILE *f = fopen(path, "r");
  if (!f) return -1;
  while (found < 0 && fgets(line, sizeof line, f))
    if (!strncmp(line, name, strlen(name)) && line[strlen(name)] == ':' &&
        sscanf(line + strlen(name) + 1, "%ld", &kib) == 1)
      found = kib * 1024;
  fclose(f);
  return found;
}

int snapshot(struct snapshot *now) {
  const char *path = "/proc/self/smaps_rollup";
  long private_clean = field(path, "Private_Clean"), shared_clean = field(path, "Shared_Clean");
  now->rss = field(path, "Rss");
  now->pss = field(path, "Pss");
  now->anonymous = field(path, "Anonymous");
  now->swap = field(path, "Swap");
  now->private_dirty = field(path, "Private_Dirty");
  now->uss = private_clean + now->private_dirty;
  now->file_clean = private_clean + shared_clean;
  return now->rss >= 0 && now->pss >= 0 && now->anonymous >= 0 && now->swap >= 0 &&
         now->private_dirty >= 0 && private_clean >= 0 && shared_clean >= 0;
}

long peak_rss(void) { return field("/proc/self/status", "VmHWM"); }

// Exact to the byte at the ends of a region and to the page inside. The shared page of zeros, which
// a read of untouched memory maps, is neither exclusive nor a file's: it costs nothing.
long resident_bytes(const struct region *regions, int n) {
  uintptr_t page = sysconf(_SC_PAGESIZE);
  long total = 0;
  int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -1;
  for (int i = 0; i < n && total >= 0; i++) {
    uintptr_t start = regions[i].start, end = start + regions[i].nbytes;
    uint64_t entries[512];
    for (uintptr_t p = start / page, last = (end + page - 1) / page; p < last;) {
      size_t want = last - p < 512 ? last - p : 512;
      ssize_t got = pread(fd, entries, want * sizeof *entries, p * sizeof *entries);
      if (got <= 0 || got % sizeof *entries) {
        total = -1;
        break;
      }
      for (size_t k = 0; k < got / sizeof *entries; k++, p++) {
        uint64_t e = entries[k];
        if (!(e & SWAPPED) && !((e & PRESENT) && (e & (FILE_OR_SHARED | EXCLUSIVE)))) continue;
        uintptr_t from = p * page > start ? p * page : start;
        uintptr_t to = (p + 1) * page < end ? (p + 1) * page : end;
        total += to - from;
      }
    }
  }
  close(fd);
  return total;
}

void page_granular(void) { prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0); }

void die_with_parent(void) { prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0); }
