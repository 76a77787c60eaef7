// A Vulkan driver: Mesa's software driver (DRIVER is its path), except that buffers are never destroyed.
// Mesa before 23.2 needs it, see "Drivers" in README.md. What stays is a few hundred bytes each; their memory is freed.
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

typedef void (*Function)(void);
typedef Function (*Getter)(void * owner, const char * name);

static Getter find_instance_function, find_physical_function, find_device_function;
static int32_t (*negotiate)(uint32_t * version);

__attribute__((constructor)) static void open_driver(void) {
    void * driver = dlopen(DRIVER, RTLD_NOW | RTLD_LOCAL);
    if (!driver) return;
    find_instance_function = (Getter) dlsym(driver, "vk_icdGetInstanceProcAddr");
    find_physical_function = (Getter) dlsym(driver, "vk_icdGetPhysicalDeviceProcAddr");
    negotiate = (int32_t (*)(uint32_t *)) dlsym(driver, "vk_icdNegotiateLoaderICDInterfaceVersion");
}

static void keep_buffer(void * device, uint64_t buffer, const void * allocator) {
    (void) device, (void) buffer, (void) allocator;
}

static Function get_device_function(void * device, const char * name) {
    return strcmp(name, "vkDestroyBuffer") ? find_device_function(device, name) : (Function) keep_buffer;
}

// The functions of a driver that the Vulkan loader calls.
int32_t vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t * version) {
    return negotiate ? negotiate(version) : -9;  // VK_ERROR_INCOMPATIBLE_DRIVER
}

Function vk_icdGetPhysicalDeviceProcAddr(void * instance, const char * name) {
    return find_physical_function(instance, name);
}

Function vk_icdGetInstanceProcAddr(void * instance, const char * name) {
    if (!strcmp(name, "vkDestroyBuffer")) return (Function) keep_buffer;
    const Function found = find_instance_function(instance, name);
    if (!found || strcmp(name, "vkGetDeviceProcAddr")) return found;
    find_device_function = (Getter) found;
    return (Function) get_device_function;
}
