// flare_abi(): sizes and offsets as this compiler sees them, for tests of foreign bindings.
#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <string>

#include "api/status.h"

namespace flare {
namespace {

std::string describe() {
    std::string text;
    char line[256];
#define FLARE_STRUCT(type)                                                             \
    std::snprintf(line, sizeof(line), "struct %s %zu\n", #type, sizeof(type)); \
    text += line;
#define FLARE_FIELD(type, name)                                                                             \
    std::snprintf(line, sizeof(line), "field %s.%s %zu %zu\n", #type, #name, offsetof(type, name), sizeof(type{}.name)); \
    text += line;
#define FLARE_FUNCTION(name, signature)                                         \
    static_cast<void>(&name);                                                   \
    std::snprintf(line, sizeof(line), "function %s %s\n", #name, signature); \
    text += line;
#define FLARE_CONSTANT(name)                                                                                 \
    std::snprintf(line, sizeof(line), "constant %s %" PRId64 "\n", #name, static_cast<int64_t>(name)); \
    text += line;
#include "api/abi.inc"
#undef FLARE_STRUCT
#undef FLARE_FIELD
#undef FLARE_FUNCTION
#undef FLARE_CONSTANT
    return text;
}

}  // namespace
}  // namespace flare

extern "C" const char* flare_abi(void) {
    static const std::string text = flare::describe();
    return text.c_str();
}
