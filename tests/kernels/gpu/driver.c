/* A CUDA driver for a GPU that is not there: what Triton's launcher asks of libcuda.so.1.

   Machine code is looked at, not loaded, and nothing is run. A launch is refused as an H200's driver would: with more
   shared memory than there is, or, where programs wait for each other, with more of them than can be resident. */
#include "cuda.h"
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROCESSORS = 132, SHARED = 233472, SHARED_OF_BLOCK = 232448, REGISTERS = 65536, RESERVED = 1024 };
enum { REGISTER_COUNT = 0x2f, SIZED = 4 }; /* of an entry in a section .nv.info */

typedef struct { int registers, shared; } Function;

long launched = 0, cooperative = 0;

static int registers_of(const char *image) {
  const Elf64_Ehdr *head = (const Elf64_Ehdr *)image;
  const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + head->e_shoff);
  const char *names = image + sections[head->e_shstrndx].sh_offset;
  int most = -1;
  for (int i = 0; i < head->e_shnum; i++) {
    if (strcmp(names + sections[i].sh_name, ".nv.info")) continue;
    const unsigned char *at = (const unsigned char *)image + sections[i].sh_offset, *end = at + sections[i].sh_size;
    while (at + 4 <= end) {
      int format = at[0], kind = at[1], size = at[2] | at[3] << 8;
      at += 4;
      if (format != SIZED) continue;
      if (kind == REGISTER_COUNT && *(const int *)(at + 4) > most) most = *(const int *)(at + 4);
      at += size;
    }
  }
  return most;
}

/* Programs that fit on a multiprocessor: warps are spread over four register files, 256 registers at a time. */
static int resident(const Function *f, int warps, int shared) {
  int of_warp = ((f->registers + 7) / 8 * 8 * 32 + 255) / 256 * 256;
  int by_registers = REGISTERS / 4 / of_warp * 4 / warps;
  int by_shared = SHARED / (shared + RESERVED), by_threads = 64 / warps;
  int least = by_registers < by_shared ? by_registers : by_shared;
  return least < by_threads ? least : by_threads;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra) {
  const Function *f = (const Function *)function;
  long programs = (long)config->gridDimX * config->gridDimY * config->gridDimZ;
  int waits = 0, fit = resident(f, (config->blockDimX + 31) / 32, config->sharedMemBytes);
  for (unsigned i = 0; i < config->numAttrs; i++) waits |= config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
  if ((int)config->sharedMemBytes > f->shared || fit < 1) return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
  if (waits && programs > (long)fit * PROCESSORS) return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  launched++;
  cooperative += waits;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)image; /* the function is asked for at once, while the image is there */
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  Function *f = malloc(sizeof(Function));
  f->registers = registers_of((const char *)module);
  f->shared = 49152;
  *function = (CUfunction)f;
  return f->registers > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute what, CUfunction function) {
  *value = what == CU_FUNC_ATTRIBUTE_NUM_REGS               ? ((Function *)function)->registers
           : what == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
                                                             : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute what, int value) {
  if (what == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) ((Function *)function)->shared = value;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute what, CUdevice device) {
  *value = what == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN       ? SHARED_OF_BLOCK
           : what == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR ? SHARED
           : what == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT                 ? PROCESSORS
           : what == CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK              ? REGISTERS
                                                                              : 32;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute what, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  static char said[32];
  snprintf(said, sizeof said, "CUDA error %d", (int)error);
  *text = said;
  return CUDA_SUCCESS;
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 12080, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { return *device = number, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = (CUcontext)8, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)8, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *what, void **data, CUdeviceptr pointer) {
  return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  return *count = 1, CUDA_SUCCESS;
}
