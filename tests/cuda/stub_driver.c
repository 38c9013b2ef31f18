/* A stub of libcuda.so.1: device memory is host memory, streams complete at once, and kernels do not run unless
 * `stub_device.cpp` is linked, which receives launches and emulates the kernels' effect.
 * Every call is logged to the file STUB_CUDA_LOG, if set, with its name and its integer arguments.
 * After `stub_fail` a function of that name, cuGraphLaunch, cuLaunchKernel or cuStreamWriteValue32, fails. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uintptr_t word;

void stub_kernel(word function, const char *name) __attribute__((weak));
void stub_launched(word function, unsigned grid, void **arguments) __attribute__((weak));
void stub_replayed(void) __attribute__((weak));

static int logs(void) {
    static int known = -1;
    return known < 0 ? known = getenv("STUB_CUDA_LOG") != NULL : known;
}
static char failing[64];
void stub_fail(const char *name) { snprintf(failing, sizeof failing, "%s", name); }
static int fails(const char *name) { return failing[0] && !strcmp(failing, name) ? 719 : 0; }
static FILE *log_file(void) {
    static FILE *file;
    if (!file) file = fopen(getenv("STUB_CUDA_LOG"), "w");
    setvbuf(file, NULL, _IOLBF, 0);
    return file;
}
static word next_handle(void) {
    static word handle = 0x1000;
    return handle += 16;
}
#define LOG(...) (logs() ? fprintf(log_file(), __VA_ARGS__) : 0)
void stub_note(const char *line) { LOG("%s\n", line); }
#define MAKES(name)                                                                                                    \
    int name(word *out, word a, word b, word c, word d) {                                                              \
        *out = next_handle();                                                                                          \
        LOG(#name " %lu %lu\n", (unsigned long)*out, (unsigned long)a);                                                \
        return 0;                                                                                                      \
    }
#define TAKES(name)                                                                                                    \
    int name(word a, word b, word c, word d) {                                                                         \
        LOG(#name " %lu %lu %lu %lu\n", (unsigned long)a, (unsigned long)b, (unsigned long)c, (unsigned long)d);       \
        return 0;                                                                                                      \
    }

int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status) {
    char versioned[128];
    *out = NULL;
    for (int v = 4; v > 1 && !*out; v--) {
        snprintf(versioned, sizeof versioned, "%s_v%d", name, v);
        *out = dlsym(RTLD_DEFAULT, versioned);
        if (!*out) {
            void *self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
            *out = dlsym(self, versioned);
        }
    }
    if (!*out) *out = dlsym(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), name);
    if (status) *status = *out ? 0 : 1;
    return *out ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **out, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuDeviceGetCount(int *count) { return *count = 2, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char *name, int length, int device) { return snprintf(name, length, "Stub %d", device), 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = 16 * device + i;
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 132;
    return 0;
}
int cuGetErrorName(int error, const char **name) { return *name = "CUDA_ERROR_STUB", 0; }
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { return *free_bytes = 1 << 30, *total = 1ul << 31, 0; }
int cuMemAlloc_v2(word *out, size_t size) {
    if (size > (1 << 30)) return 2;
    *out = (word)aligned_alloc(256, (size + 255) / 256 * 256);
    LOG("cuMemAlloc %zu\n", size);
    return 0;
}
int cuMemFree_v2(word address) { return free((void *)address), LOG("cuMemFree\n"), 0; }
int cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    *out = aligned_alloc(256, (size + 255) / 256 * 256);
    memset(*out, 0x5a, size);
    LOG("cuMemHostAlloc %zu %u\n", size, flags);
    return 0;
}
int cuMemHostGetDevicePointer_v2(word *out, void *host, unsigned flags) { return *out = (word)host, 0; }
int cuMemHostRegister_v2(void *host, size_t size, unsigned flags) {
    return LOG("cuMemHostRegister %zu %u\n", size, flags), 0;
}
int cuMemHostUnregister(void *host) { return LOG("cuMemHostUnregister\n"), 0; }
int cuMemFreeHost(void *host) { return free(host), LOG("cuMemFreeHost\n"), 0; }
int cuMemcpyHtoDAsync_v2(word to, const void *from, size_t size, word stream) {
    return memcpy((void *)to, from, size), LOG("cuMemcpyHtoDAsync %zu %lu\n", size, (unsigned long)stream), 0;
}
int cuMemcpyDtoHAsync_v2(void *to, word from, size_t size, word stream) {
    return memcpy(to, (void *)from, size), LOG("cuMemcpyDtoHAsync %zu %lu\n", size, (unsigned long)stream), 0;
}
int cuMemcpyDtoDAsync_v2(word to, word from, size_t size, word stream) {
    return memcpy((void *)to, (void *)from, size), LOG("cuMemcpyDtoDAsync %zu %lu\n", size, (unsigned long)stream), 0;
}
int cuMemsetD32Async(word address, unsigned value, size_t count, word stream) {
    for (size_t i = 0; i < count; i++) ((unsigned *)address)[i] = value;
    return LOG("cuMemsetD32Async %u %zu %lu\n", value, count, (unsigned long)stream), 0;
}
int cuModuleLoadData(word *module, const char *image) {
    return *module = next_handle(), LOG("cuModuleLoadData %s\n", image), 0;
}
int cuModuleGetFunction(word *function, word module, const char *name) {
    *function = next_handle();
    if (stub_kernel) stub_kernel(*function, name);
    return LOG("cuModuleGetFunction %lu %s\n", (unsigned long)*function, name), 0;
}
int cuLaunchKernel(word f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   word stream, void **arguments, void **extra) {
    LOG("cuLaunchKernel %lu grid %u %u %u block %u %u %u shared %u stream %lu arguments %lu %u extra %d\n",
        (unsigned long)f, gx, gy, gz, bx, by, bz, shared, (unsigned long)stream, *(unsigned long *)arguments[0],
        stub_launched || !arguments[1] ? 0 : *(unsigned *)arguments[1], extra != NULL);
    if (stub_launched) stub_launched(f, gx, arguments);
    return fails("cuLaunchKernel");
}
int cuStreamQuery(word stream) { return getenv("STUB_CUDA_BUSY") ? 600 : 0; }
int cuEventElapsedTime_v2(float *ms, word begin, word end) { return *ms = 2.5f, 0; }
int cuStreamBeginCapture_v2(word stream, int mode) {
    return LOG("cuStreamBeginCapture %lu %d\n", (unsigned long)stream, mode), 0;
}
int cuStreamBeginCaptureToGraph(word stream, word graph, void *dependencies, void *edges, size_t count, int mode) {
    LOG("cuStreamBeginCaptureToGraph %lu %lu %d %zu %d\n", (unsigned long)stream, (unsigned long)graph,
        dependencies != NULL, count, mode);
    return 0;
}
int cuStreamEndCapture(word stream, word *graph) {
    return *graph = next_handle(), LOG("cuStreamEndCapture %lu %lu\n", (unsigned long)stream, (unsigned long)*graph), 0;
}
int cuStreamGetCaptureInfo_v3(word stream, int *status, uint64_t *id, word *graph, const word **dependencies,
                              const void **edges, size_t *count) {
    *status = 1; /* active, and nothing captured so far */
    if (id) *id = 1;
    if (graph) *graph = 0x9990;
    if (dependencies) *dependencies = NULL;
    if (edges) *edges = NULL;
    if (count) *count = 0;
    return 0;
}
int cuGraphConditionalHandleCreate(uint64_t *handle, word graph, word context, unsigned initial, unsigned flags) {
    *handle = 77;
    LOG("cuGraphConditionalHandleCreate %lu %u %u\n", (unsigned long)graph, initial, flags);
    return 0;
}
struct conditional {
    int type, reserved[3];
    uint64_t handle;
    int kind;
    unsigned size;
    word *bodies;
    word context;
};
int cuGraphAddNode_v2(word *node, word graph, const word *dependencies, const void *edges, size_t count,
                      struct conditional *parameters) {
    static word bodies[1] = {0x5550};
    parameters->bodies = bodies;
    *node = 0x4440;
    LOG("cuGraphAddNode %lu after %zu type %d handle %lu kind %d size %u\n", (unsigned long)graph, count,
        parameters->type, (unsigned long)parameters->handle, parameters->kind, parameters->size);
    return 0;
}
int cuStreamUpdateCaptureDependencies_v2(word stream, word *nodes, const void *edges, size_t count, unsigned flags) {
    LOG("cuStreamUpdateCaptureDependencies %lu %lu %zu %u\n", (unsigned long)stream, (unsigned long)nodes[0], count,
        flags);
    return 0;
}
struct ipc_handle {
    word address;
    char rest[56];
};
int cuIpcGetMemHandle(struct ipc_handle *handle, word address) {
    memset(handle, 0, sizeof *handle);
    return handle->address = address, LOG("cuIpcGetMemHandle\n"), 0;
}
int cuIpcOpenMemHandle_v2(word *address, struct ipc_handle handle, unsigned flags) {
    return *address = handle.address, LOG("cuIpcOpenMemHandle %u\n", flags), 0;
}
int cuIpcCloseMemHandle(word address) { return LOG("cuIpcCloseMemHandle\n"), 0; }
int cuMemsetD8_v2(word address, unsigned char value, size_t count) { return memset((void *)address, value, count), 0; }
int cuStreamWriteValue32_v2(word stream, word address, uint32_t value, unsigned flags) {
    *(uint32_t *)address = value, LOG("cuStreamWriteValue32 %u %u\n", value, flags);
    return fails("cuStreamWriteValue32");
}
int cuStreamWaitValue32_v2(word stream, word address, uint32_t value, unsigned flags) {
    LOG("cuStreamWaitValue32 %u %u %s\n", value, flags, *(uint32_t *)address == value ? "there" : "missing");
    return 0;
}
int cuGraphLaunch(word graph, word stream) {
    LOG("cuGraphLaunch %lu %lu\n", (unsigned long)graph, (unsigned long)stream);
    if (stub_replayed) stub_replayed();
    return fails("cuGraphLaunch");
}
MAKES(cuDevicePrimaryCtxRetain)
MAKES(cuStreamCreate)
MAKES(cuEventCreate)
MAKES(cuGraphInstantiateWithFlags)
TAKES(cuDevicePrimaryCtxRelease_v2)
TAKES(cuCtxSetCurrent)
TAKES(cuCtxPushCurrent_v2)
MAKES(cuCtxPopCurrent_v2)
TAKES(cuFuncLoad)
TAKES(cuModuleUnload)
TAKES(cuFuncSetAttribute)
TAKES(cuStreamDestroy_v2)
TAKES(cuStreamSynchronize)
TAKES(cuEventDestroy_v2)
TAKES(cuEventRecord)
TAKES(cuGraphUpload)
TAKES(cuGraphDestroy)
TAKES(cuGraphExecDestroy)
