// device_bench/runners/run_executorch.py in C++: one method per capacity, every planned arena a
// mapping of ours, so that the cache's can be told from the rest.
#include <executorch/extension/data_loader/mmap_data_loader.h>
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/platform/runtime.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runner.h"

namespace executorch::extension::threadpool {
// The wheel has the library and not its header.
class ThreadPool {
 public:
  bool _unsafe_reset_threadpool(uint32_t threads);
};
ThreadPool* get_threadpool();
}  // namespace executorch::extension::threadpool

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::aten::TensorImpl;
using executorch::extension::MallocMemoryAllocator;
using executorch::extension::MmapDataLoader;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::HierarchicalAllocator;
using executorch::runtime::MemoryManager;
using executorch::runtime::Method;
using executorch::runtime::Program;
using executorch::runtime::Result;
using executorch::runtime::Span;

namespace {

const job* the_job;
std::optional<Result<MmapDataLoader>> loader;
std::optional<Result<Program>> program;
std::optional<Result<Method>> method;
MallocMemoryAllocator method_memory, temporary_memory;
std::vector<Span<uint8_t>> arenas;
std::unique_ptr<HierarchicalAllocator> planned;
std::unique_ptr<MemoryManager> manager;
std::vector<int64_t> positions;
region cache = {0, 0};

void check(Error error, const char* what) {
  if (error != Error::Ok) fail("%s: ExecuTorch error 0x%x", what, (unsigned)error);
}

// One int64 tensor [1, n] or [n]; the runtime copies it or points at the data for the one call.
void set_input(size_t index, int64_t* data, long n, int rank) {
  int32_t sizes[2] = {1, (int32_t)n};
  uint8_t order[2] = {0, 1};
  int32_t strides[2] = {(int32_t)n, 1};
  int skip = 2 - rank;
  TensorImpl impl(ScalarType::Long, rank, sizes + skip, data, order, strides + skip);
  check((*method)->set_input(EValue(Tensor(&impl)), index), "the input does not fit the method");
}

}  // namespace

extern "C" {

int runtime_import(const job*) { return 0; }

const char* runtime_name(void) { return "executorch native"; }

void runner_open(const job* j) {
  the_job = j;
  if (strcmp(j->formulation, "plain-bmm") && strcmp(j->formulation, "full"))
    fail("formulation '%s' is unknown to the native runner", j->formulation);
  executorch::runtime::runtime_init();
  auto* pool = executorch::extension::threadpool::get_threadpool();
  if (pool) pool->_unsafe_reset_threadpool(j->threads);
  loader.emplace(MmapDataLoader::from(j->model, MmapDataLoader::MlockConfig::NoMlock));
  check(loader->error(), "the model cannot be opened");
  program.emplace(Program::load(&loader->get()));
  check(program->error(), "the model cannot be loaded");
  static std::string name;
  name = "forward_" + std::to_string(j->capacity);
  auto meta = (*program)->method_meta(name.c_str());
  if (!meta.ok()) fail("the model has no method %s", name.c_str());
  size_t cache_bytes = j->n_tensors * j->kv_heads * j->capacity * j->head_dim * j->itemsize;
  for (size_t i = 0; i < meta->num_memory_planned_buffers(); i++) {
    size_t nbytes = meta->memory_planned_buffer_size(i).get();
    void* arena = mmap(nullptr, nbytes ? nbytes : 1, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (arena == MAP_FAILED) fail("no memory for an arena of %zu bytes", nbytes);
    madvise(arena, nbytes, MADV_NOHUGEPAGE);
    arenas.emplace_back((uint8_t*)arena, nbytes);
    // The exporter plans the cache, and nothing else, into the last arena.
    if (cache_bytes && nbytes == cache_bytes) cache = {(uintptr_t)arena, nbytes};
  }
  planned = std::make_unique<HierarchicalAllocator>(
      Span<Span<uint8_t>>(arenas.data(), arenas.size()));
  manager = std::make_unique<MemoryManager>(&method_memory, planned.get(), &temporary_memory);
  method.emplace((*program)->load_method(name.c_str(), manager.get()));
  check(method->error(), "the method cannot be loaded");
}

long runner_chunk(long) {
  return the_job->prefill_chunk < the_job->capacity ? the_job->prefill_chunk : the_job->capacity;
}

const float* runner_step(const int64_t* ids, long n, long past) {
  set_input(0, const_cast<int64_t*>(ids), n, 2);
  if (the_job->n_tensors) {
    positions.resize(n);
    for (long i = 0; i < n; i++) positions[i] = past + i;
    set_input(1, positions.data(), n, 1);
  }
  check((*method)->execute(), "the model failed");
  const EValue& out = (*method)->get_output(0);
  if (!out.isTensor() || out.toTensor().numel() != the_job->vocab ||
      out.toTensor().scalar_type() != ScalarType::Float)
    fail("the model's output is not [1, 1, %ld] float32", the_job->vocab);
  return out.toTensor().const_data_ptr<float>();
}

// Rows of the old sequence stay in memory; each gets weight exactly 0 until overwritten.
void runner_reset(void) {}

int runner_regions(region* regions, int room) {
  if (!the_job->n_tensors || room < 1) return 0;
  if (!cache.nbytes) return -1;
  regions[0] = cache;
  return 1;
}

}  // extern "C"
