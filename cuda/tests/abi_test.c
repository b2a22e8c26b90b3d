/* The header from C: self-sufficient, no hidden padding, versions and struct sizes, NULL handling, calls without a device. */
#include "flare.h"

#include <stdio.h>
#include <string.h>

static int failures = 0;

static void check(int condition, const char* what) {
    if (!condition) {
        char text[512];
        flare_last_error(text, sizeof(text));
        printf("FAIL %s (last error: %s)\n", what, text);
        ++failures;
    }
}

/* Every field listed in abi.inc starts where the one before it ends: none is missing and none is padded. */
static size_t end_of_last_field = 0;

static void check_layout(void) {
    size_t struct_size = 0;
    const char* struct_name = "";
#define FLARE_STRUCT(type)                                                      \
    check(end_of_last_field == struct_size, struct_name);                       \
    struct_name = "fields of the struct after this one leave gaps: " #type;     \
    struct_size = sizeof(type);                                                 \
    end_of_last_field = 0;
#define FLARE_FIELD(type, name)                                                                       \
    check(offsetof(type, name) == end_of_last_field, "gap or missing field before " #type "." #name); \
    end_of_last_field = offsetof(type, name) + sizeof(((type*)0)->name);
#define FLARE_FUNCTION(name, signature)
#define FLARE_CONSTANT(name)
#include "api/abi.inc"
#undef FLARE_STRUCT
#undef FLARE_FIELD
#undef FLARE_FUNCTION
#undef FLARE_CONSTANT
    check(end_of_last_field == struct_size, struct_name);
}

static void check_struct_size(void) {
    struct {
        flare_attention_params params;
        unsigned char surplus[16];
    } newer;
    memset(&newer, 0, sizeof(newer));
    newer.params.device = FLARE_DEVICE_CPU;
    newer.params.dtype = FLARE_FP32;
    newer.params.heads_q = newer.params.heads_kv = 1;
    newer.params.head_dim_qk = newer.params.head_dim_v = 64;
    check(flare_attention_forward(&newer.params) == FLARE_ERROR_STRUCT_SIZE, "struct_size 0 is refused");
    newer.params.struct_size = 8;
    check(flare_attention_forward(&newer.params) == FLARE_ERROR_STRUCT_SIZE, "a struct cut short is refused");
    newer.params.struct_size = sizeof(flare_attention_params);
    check(flare_attention_forward(&newer.params) == FLARE_OK, "batch 0 succeeds");
    newer.params.struct_size = sizeof(newer);
    check(flare_attention_forward(&newer.params) == FLARE_OK, "a longer struct of zeros is accepted");
    newer.surplus[3] = 1;
    check(flare_attention_forward(&newer.params) == FLARE_ERROR_STRUCT_SIZE, "a longer struct with unknown fields set is refused");
}

static void check_null(void) {
    uint64_t bytes = 0;
    char name[64];
    check(flare_attention_forward(NULL) == FLARE_ERROR_NULL, "attention_forward(NULL)");
    check(flare_attention_merge(NULL) == FLARE_ERROR_NULL, "attention_merge(NULL)");
    check(flare_mla_prefill(NULL) == FLARE_ERROR_NULL, "mla_prefill(NULL)");
    check(flare_mla_decode(NULL) == FLARE_ERROR_NULL, "mla_decode(NULL)");
    check(flare_kda_forward(NULL) == FLARE_ERROR_NULL, "kda_forward(NULL)");
    check(flare_kda_decode(NULL) == FLARE_ERROR_NULL, "kda_decode(NULL)");
    check(flare_cast(NULL) == FLARE_ERROR_NULL, "cast(NULL)");
    check(flare_fill(NULL) == FLARE_ERROR_NULL, "fill(NULL)");
    check(flare_cache_append(NULL) == FLARE_ERROR_NULL, "cache_append(NULL)");
    check(flare_attention_workspace(NULL, &bytes) == FLARE_ERROR_NULL, "attention_workspace(NULL)");
    check(flare_kernel_name(FLARE_OP_CAST, NULL, name, sizeof(name)) == FLARE_ERROR_NULL, "kernel_name(NULL)");
    check(flare_kernel_name(FLARE_OP_CAST, NULL, NULL, 0) == FLARE_ERROR_NULL, "kernel_name without a buffer");
    check(flare_kernel_name(77, NULL, name, sizeof(name)) == FLARE_ERROR_OPTION, "kernel_name of no operation");
}

static void check_texts(void) {
    char text[8];
    const char* abi = flare_abi();
    check(flare_version() == FLARE_VERSION, "library and header are of one version");
    check(strstr(flare_build_info(), "flare 0.1.0") == flare_build_info(), "build info starts with the version");
    check(strcmp(flare_status_string(FLARE_ERROR_SHAPE), "FLARE_ERROR_SHAPE") == 0, "status string");
    check(strcmp(flare_status_string(12345), "unknown status") == 0, "status string of no status");
    check(strstr(abi, "struct flare_attention_params ") != NULL, "abi lists structs");
    check(strstr(abi, "field flare_kda_decode_params.cu_seqlens ") != NULL, "abi lists fields");
    check(strstr(abi, "function flare_kernel_name i32(i32,ptr,ptr,u64)") != NULL, "abi lists functions");
    check(strstr(abi, "constant FLARE_MASK_WINDOW 2") != NULL, "abi lists constants");
    check(flare_attention_forward(NULL) == FLARE_ERROR_NULL, "set an error");
    check(flare_last_error(text, sizeof(text)) == strlen("params is NULL") && strcmp(text, "params ") == 0,
          "last_error tells the whole length and cuts to the buffer");
    check(flare_last_error(NULL, 0) == strlen("params is NULL"), "last_error without a buffer tells the length");
}

/* A device that isn't there, or a build without CUDA: a status and a reason, never a crash. */
static void check_no_device(void) {
    flare_fill_params fill;
    char text[512];
    int32_t status;
    memset(&fill, 0, sizeof(fill));
    fill.struct_size = sizeof(fill);
    fill.dtype = FLARE_FP32;
    fill.rank = 1; /* of length 0: no memory needed */
    fill.device = 31;
    status = flare_fill(&fill);
    flare_last_error(text, sizeof(text));
    check(status >= 200 && status < 400, "a CUDA device that isn't there gives a device status");
    check(strlen(text) > 20, "... and says why");
    fill.device = -2;
    check(flare_fill(&fill) == FLARE_ERROR_OPTION, "device -2 is refused");
}

int main(void) {
    check_layout();
    check_struct_size();
    check_null();
    check_texts();
    check_no_device();
    printf("abi_test: %d failures\n", failures);
    return failures != 0;
}
