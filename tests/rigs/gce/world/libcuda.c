/* STAND-IN for libcuda.so.1: what kimisession/node/preflight_ptx.py asks of a driver, answered by the version of its pretended
 * module. It takes the PTX of its own CUDA and nothing newer (CUDA release notes; PTX ISA release history). */
#include <stdio.h>

enum { OK = 0, INVALID = 1, NO_DEVICE = 100, UNSUPPORTED_PTX = 222 };

static int branch(void) {
    int found = 0;
    FILE *file = fopen("/sys/module/nvidia/version", "r");
    if (file == NULL) return 0;
    if (fscanf(file, "%d", &found) != 1) found = 0;
    fclose(file);
    return found;
}

int cuInit(unsigned flags) { return flags == 0 && branch() ? OK : NO_DEVICE; }
int cuDriverGetVersion(int *version) { *version = branch() >= 580 ? 13000 : 12080; return OK; }
int cuDeviceGet(int *device, int number) { *device = number; return OK; }
int cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, size, "stand-in %d for NVIDIA H100 80GB HBM3", device);
    return OK;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 && device == 0 ? 9 : 0; return OK; }
int cuCtxCreate_v2(void **context, unsigned flags, int device) { *context = &branch; return flags == 0 && device == 0 ? OK : INVALID; }
int cuCtxDestroy_v2(void *context) { return context == (void *)&branch ? OK : INVALID; }
int cuModuleLoadData(void **module, const char *image) {
    int major, minor;
    if (sscanf(image, ".version %d.%d", &major, &minor) != 2) return INVALID;
    *module = &branch;
    return 10 * major + minor <= (branch() >= 580 ? 90 : 87) ? OK : UNSUPPORTED_PTX;
}
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = module; return name[0] ? OK : INVALID; }
