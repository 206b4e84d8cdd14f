/* Stands in for the GPU driver (libcuda.so.1) under KvikIO: what KvikIO looks up, and no more.

   There is one device. Its memory is the part of host memory that stand_in_device_memory names; all
   other memory is the host's. Copies are done at once, so streams and events have nothing to do. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef uintptr_t Address;

enum { SUCCESS = 0, INVALID_VALUE = 1 };
enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, DEVICE_ORDINAL = 9 };
enum { NOT_REGISTERED = 0, DEVICE = 2 };
enum { WITHOUT_BATCHED_COPIES = 12060 };

static Address start;
static size_t length;
static int object; /* every context, stream and event */

void stand_in_device_memory(void *memory, size_t bytes) { start = (Address)memory, length = bytes; }

static int on_device(Address address, size_t bytes)
{
    return address >= start && bytes <= length && address - start <= length - bytes;
}

static Result give(void **made) { return *made = &object, SUCCESS; }

Result cuInit(unsigned flags) { return SUCCESS; }
Result cuDriverGetVersion(int *version) { return *version = WITHOUT_BATCHED_COPIES, SUCCESS; }
Result cuGetErrorName(Result error, const char **name) { return *name = "REFUSED", SUCCESS; }
Result cuGetErrorString(Result error, const char **text) { return *text = "refused", SUCCESS; }

Result cuDeviceGet(int *device, int ordinal) { return *device = ordinal, SUCCESS; }
Result cuDeviceGetCount(int *count) { return *count = 1, SUCCESS; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = 0, SUCCESS; }
Result cuDevicePrimaryCtxRetain(void **context, int device) { return give(context); }
Result cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }

Result cuCtxCreate_v4(void **context, void *how, unsigned flags, int device)
{
    return give(context);
}
Result cuCtxDestroy_v2(void *context) { return SUCCESS; }
Result cuCtxPushCurrent_v2(void *context) { return SUCCESS; }
Result cuCtxPopCurrent_v2(void **context) { return give(context); }
Result cuCtxGetCurrent(void **context) { return give(context); }
Result cuCtxGetDevice(int *device) { return *device = 0, SUCCESS; }

Result cuMemHostAlloc(void **memory, size_t bytes, unsigned flags)
{
    return (*memory = malloc(bytes)) ? SUCCESS : INVALID_VALUE;
}
Result cuMemFreeHost(void *memory) { return free(memory), SUCCESS; }
Result cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags) { return SUCCESS; }
Result cuMemHostUnregister(void *memory) { return SUCCESS; }

Result cuMemcpyAsync(Address to, Address from, size_t bytes, void *stream)
{
    if (on_device(to, bytes) == on_device(from, bytes)) return INVALID_VALUE;
    return memcpy((void *)to, (void *)from, bytes), SUCCESS;
}
Result cuMemcpyHtoDAsync_v2(Address to, void *from, size_t bytes, void *stream)
{
    return cuMemcpyAsync(to, (Address)from, bytes, stream);
}
Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t bytes, void *stream)
{
    return cuMemcpyAsync((Address)to, from, bytes, stream);
}

Result cuPointerGetAttribute(void *value, int attribute, Address address)
{
    if (!on_device(address, 1)) return INVALID_VALUE;
    switch (attribute) {
    case CONTEXT: return give(value);
    case DEVICE_POINTER: return *(Address *)value = address, SUCCESS;
    case DEVICE_ORDINAL: return *(int *)value = 0, SUCCESS;
    default: return INVALID_VALUE;
    }
}
Result cuPointerGetAttributes(unsigned count, int *attributes, void **values, Address address)
{
    if (count != 1 || attributes[0] != MEMORY_TYPE) return INVALID_VALUE;
    return *(int *)values[0] = on_device(address, 1) ? DEVICE : NOT_REGISTERED, SUCCESS;
}
Result cuMemGetAddressRange_v2(Address *base, size_t *bytes, Address address)
{
    return *base = start, *bytes = length, on_device(address, 1) ? SUCCESS : INVALID_VALUE;
}

Result cuStreamCreate(void **stream, unsigned flags) { return give(stream); }
Result cuStreamDestroy_v2(void *stream) { return SUCCESS; }
Result cuStreamSynchronize(void *stream) { return SUCCESS; }
Result cuEventCreate(void **event, unsigned flags) { return give(event); }
Result cuEventDestroy_v2(void *event) { return SUCCESS; }
Result cuEventRecord(void *event, void *stream) { return SUCCESS; }
Result cuEventQuery(void *event) { return SUCCESS; }
Result cuEventSynchronize(void *event) { return SUCCESS; }
Result cuLaunchHostFunc(void *stream, void (*work)(void *), void *data)
{
    return work(data), SUCCESS;
}
