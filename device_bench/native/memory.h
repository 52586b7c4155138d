// Memory of this process from /proc, as device_bench/memory.py reads it.
#ifndef EDGEQKV_MEMORY_H
#define EDGEQKV_MEMORY_H

#include "runner.h"

struct snapshot {  // bytes
  long rss, pss, uss, anonymous, swap, file_clean, private_dirty;
};

int snapshot(struct snapshot *now);  // 0 where the kernel has no smaps_rollup
long peak_rss(void);                 // VmHWM
long resident_bytes(const struct region *regions, int n);  // -1 where pagemap does not tell
void page_granular(void);            // no transparent huge pages in this process
void die_with_parent(void);

#endif
