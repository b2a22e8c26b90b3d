// Plain C++: runs on every processor.
#include "kernels.inl"
