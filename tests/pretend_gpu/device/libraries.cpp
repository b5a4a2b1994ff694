// cuBLAS and the classic interface of cuDNN: handles are empty, work is counted.
//
// Most functions here look at none of their arguments, and C passes them to one that takes none.
#include "pretend.h"

#include <cstring>

using namespace pretend;

namespace {

int make(void** handle) {
  static char place[64];
  *handle = place;
  return 0;
}

}  // namespace

#define SUCCEEDS(name) \
  EXPORT int name() { return 0; }
#define MAKES(name) \
  EXPORT int name(void** handle) { return make(handle); }
#define PRODUCT(name) \
  EXPORT int name() { return launched(stream_of_products, PRODUCTS) == cudaSuccess ? 0 : 13; }
#define CONVOLUTION(name) \
  EXPORT int name() { return launched(stream_of_cudnn, CONVOLUTIONS) == cudaSuccess ? 0 : 5000; }

// --- cuBLAS

static thread_local cudaStream_t stream_of_products = nullptr;

EXPORT int cublasSetStream_v2(void*, cudaStream_t stream) {
  stream_of_products = stream;
  return 0;
}
EXPORT int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}
EXPORT int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}
MAKES(cublasCreate_v2)
SUCCEEDS(cublasDestroy_v2)
SUCCEEDS(cublasSetWorkspace_v2)
SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasDotEx)
PRODUCT(cublasStrsm_v2)

// --- cuBLASLt

EXPORT int cublasLtMatmul(
    void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*,
    void*, void*, void*, const void*, void*, size_t, cudaStream_t stream) {
  return launched(stream, PRODUCTS) == cudaSuccess ? 0 : 13;
}
EXPORT size_t cublasLtGetVersion() { return PRETEND_CUDA_VERSION * 10; }
MAKES(cublasLtCreate)
MAKES(cublasLtMatmulDescCreate)
MAKES(cublasLtMatmulPreferenceCreate)
MAKES(cublasLtMatrixLayoutCreate)
SUCCEEDS(cublasLtMatmulDescDestroy)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceDestroy)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutDestroy)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
EXPORT int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int, void* result, int* found) {
  memset(result, 0, 8 * 8 + 8 + 4 + 4 + 16);
  *found = 1;
  return 0;
}

// --- cuDNN

static thread_local cudaStream_t stream_of_cudnn = nullptr;
// Of the convolution that is described last: tensor cores, TF32, or neither (torch asserts that).
static thread_local int math_of_convolution = 0;

EXPORT int cudnnSetConvolutionMathType(void*, int math) {
  math_of_convolution = math;
  return 0;
}
EXPORT int cudnnSetStream(void*, cudaStream_t stream) {
  stream_of_cudnn = stream;
  return 0;
}
EXPORT size_t cudnnGetVersion() { return 91900; }
EXPORT size_t cudnnGetCudartVersion() { return PRETEND_CUDA_VERSION; }
EXPORT const char* cudnnGetErrorString(int status) {
  return status == 0 ? "CUDNN_STATUS_SUCCESS" : "CUDNN_STATUS_EXECUTION_FAILED";
}
MAKES(cudnnCreate)
MAKES(cudnnCreateTensorDescriptor)
MAKES(cudnnCreateFilterDescriptor)
MAKES(cudnnCreateConvolutionDescriptor)
MAKES(cudnnCreateActivationDescriptor)
MAKES(cudnnCreateDropoutDescriptor)
MAKES(cudnnCreatePoolingDescriptor)
MAKES(cudnnCreateRNNDescriptor)
MAKES(cudnnCreateRNNDataDescriptor)
SUCCEEDS(cudnnDestroy)
SUCCEEDS(cudnnDestroyTensorDescriptor)
SUCCEEDS(cudnnDestroyFilterDescriptor)
SUCCEEDS(cudnnDestroyConvolutionDescriptor)
SUCCEEDS(cudnnDestroyActivationDescriptor)
SUCCEEDS(cudnnDestroyDropoutDescriptor)
SUCCEEDS(cudnnDestroyRNNDescriptor)
SUCCEEDS(cudnnDestroyRNNDataDescriptor)
SUCCEEDS(cudnnSetTensorNdDescriptor)
SUCCEEDS(cudnnSetFilterNdDescriptor)
SUCCEEDS(cudnnSetConvolutionNdDescriptor)
SUCCEEDS(cudnnSetConvolutionGroupCount)
SUCCEEDS(cudnnSetActivationDescriptor)
SUCCEEDS(cudnnSetDropoutDescriptor)
SUCCEEDS(cudnnSetRNNDataDescriptor)
SUCCEEDS(cudnnGetFilterNdDescriptor)
CONVOLUTION(cudnnConvolutionForward)
CONVOLUTION(cudnnConvolutionBackwardData)
CONVOLUTION(cudnnConvolutionBackwardFilter)
CONVOLUTION(cudnnConvolutionBiasActivationForward)
CONVOLUTION(cudnnBatchNormalizationForwardTrainingEx)
CONVOLUTION(cudnnBatchNormalizationBackwardEx)
CONVOLUTION(cudnnBatchNormalizationForwardInference)
CONVOLUTION(cudnnRNNForward)
CONVOLUTION(cudnnRNNBackwardData_v8)
CONVOLUTION(cudnnRNNBackwardWeights_v8)

namespace {

struct Choice {  // cudnnConvolutionFwdAlgoPerf_t and its two sisters
  int algorithm, status;
  float time;
  size_t memory;
  int determinism, math, reserved[3];
};
// A choice that is deterministic. cudnn.benchmark asks by Find…Ex, which would try each out.
int choose(int* found, Choice* choices) {
  memset(choices, 0, sizeof(Choice));
  choices->algorithm = choices->determinism = 1;
  choices->math = math_of_convolution;
  *found = 1;
  return 0;
}
int workspace(size_t* bytes) {
  *bytes = 1024;
  return 0;
}

}  // namespace

#define CHOICE(name)                                                                 \
  EXPORT int name(void*, void*, void*, void*, void*, int, int* found, Choice* each) { \
    return choose(found, each);                                                      \
  }
CHOICE(cudnnGetConvolutionForwardAlgorithm_v7)
CHOICE(cudnnGetConvolutionBackwardDataAlgorithm_v7)
CHOICE(cudnnGetConvolutionBackwardFilterAlgorithm_v7)
#define TRIAL(name)                                                                          \
  EXPORT int name(void*, void*, void*, void*, void*, void*, void*, void*, int, int* found,   \
                  Choice* each) {                                                            \
    return choose(found, each);                                                              \
  }
TRIAL(cudnnFindConvolutionForwardAlgorithmEx)
TRIAL(cudnnFindConvolutionBackwardDataAlgorithmEx)
TRIAL(cudnnFindConvolutionBackwardFilterAlgorithmEx)
#define WORKSPACE(name)                                                      \
  EXPORT int name(void*, void*, void*, void*, void*, int, size_t* bytes) { \
    return workspace(bytes);                                                 \
  }
WORKSPACE(cudnnGetConvolutionForwardWorkspaceSize)
WORKSPACE(cudnnGetConvolutionBackwardDataWorkspaceSize)
WORKSPACE(cudnnGetConvolutionBackwardFilterWorkspaceSize)
EXPORT int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    void*, int, int, void*, void*, void*, void*, void*, size_t* bytes) {
  return workspace(bytes);
}
EXPORT int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    void*, int, int, void*, void*, size_t* bytes) {
  return workspace(bytes);
}
EXPORT int cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    void*, int, int, void*, void*, void*, void*, void*, void*, void*, size_t* bytes) {
  return workspace(bytes);
}

// --- Recurrent layers: where cuDNN's flat weights have each layer's

namespace {

struct Recurrent {
  int gates, directions, element_bytes, input, hidden, layers;
  size_t rows() const { return size_t(gates) * hidden; }
  size_t columns(int layer) const {  // of what comes from the input, or from the layer below
    return layer < directions ? input : size_t(hidden) * directions;
  }
  // Its matrices for the input and for its state, then a bias of each.
  size_t numbers_of(int layer) const { return rows() * (columns(layer) + hidden + 2); }
  size_t before(int layer) const {
    size_t numbers = 0;
    for (int i = 0; i < layer; i++) numbers += numbers_of(i);
    return numbers;
  }
};
// The one that is described last, and the shape of its weight that is looked up last.
thread_local Recurrent recurrent;
thread_local int shape_of_weight[3];

}  // namespace

EXPORT int cudnnSetRNNDescriptor_v8(
    void*, int, int mode, int, int direction, int, int type, int, int, int input, int hidden,
    int projected, int layers, void*, unsigned) {
  const int gates[] = {1, 1, 4, 3};  // with ReLU or tanh, LSTM, GRU
  const int bytes = type == 1 ? 8 : type == 0 ? 4 : 2;
  recurrent = {gates[mode], direction + 1, bytes, input, hidden, layers};
  return projected == hidden ? 0 : 3000;  // CUDNN_STATUS_NOT_SUPPORTED
}
EXPORT int cudnnGetRNNWeightSpaceSize(void*, void*, size_t* bytes) {
  *bytes = recurrent.before(recurrent.layers * recurrent.directions) * recurrent.element_bytes;
  return 0;
}
EXPORT int cudnnGetRNNWeightParams(
    void*, void*, int layer, size_t, char* weights, int number, void*, void** matrix, void*,
    void** bias) {
  const Recurrent& all = recurrent;
  const bool of_state = number >= all.gates;
  const int gate = number - (of_state ? all.gates : 0);
  const size_t columns = of_state ? all.hidden : all.columns(layer);
  size_t at = all.before(layer);
  if (matrix) at += (of_state ? all.rows() * all.columns(layer) : 0) + gate * all.hidden * columns;
  else at += all.rows() * (all.columns(layer) + all.hidden + of_state) + gate * all.hidden;
  *(matrix ? matrix : bias) = weights + at * all.element_bytes;
  shape_of_weight[0] = 1;
  shape_of_weight[1] = all.hidden;
  shape_of_weight[2] = matrix ? int(columns) : 1;
  return 0;
}
EXPORT int cudnnGetTensorNdDescriptor(void*, int, int*, int* dimensions, int* shape, int*) {
  memcpy(shape, shape_of_weight, sizeof shape_of_weight);
  *dimensions = 3;
  return 0;
}
EXPORT int cudnnGetRNNTempSpaceSizes(void*, void*, int, void*, size_t* work, size_t* reserved) {
  if (reserved) workspace(reserved);
  return workspace(work);
}
