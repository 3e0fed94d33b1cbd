// A second device for machines without a GPU.
//
// Its memory is the host's, under the name of another device (PyTorch's "PrivateUse1").
// Every operation is handed to the CPU's kernel, after the checks that a GPU makes: no
// tensors of two devices, and, if asked, no float64. Each kernel, each copy and each
// moment at which a GPU would make the program wait is reported to a Python function.
//
// The one idea: `relabel` makes a tensor of one device out of the memory of a tensor of
// the other. So no byte is moved to run an operation, and results are the CPU's, bit for
// bit.
#include <torch/extension.h>
#include <torch/library.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>

namespace {

using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
const auto device_type = c10::DeviceType::PrivateUse1;
const Device the_device(device_type, 0);
const Device host(c10::kCPU);

// ------------------------------------------------------------------ what Python may set

bool float64_refused = false;
py::object* report_to = nullptr; // a function of (kind, name, bytes)
thread_local int silent = 0;     // > 0 while we use tensors ourselves

struct Silence {
  Silence() { ++silent; }
  ~Silence() { --silent; }
};

void report(const char* kind, const std::string& name, int64_t bytes = 0) {
  if (silent || !report_to)
    return;
  py::gil_scoped_acquire locked;
  (*report_to)(kind, name, bytes);
}

void check_dtype(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(!float64_refused || dtype != at::kDouble,
                   "this device has no float64 (neither have Apple's GPUs)");
}

// ------------------------------------------------------------------------------ memory

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    if (bytes) {
      TORCH_CHECK(!posix_memalign(&memory, 64, bytes), "out of memory");
      memset(memory, 0x7f, bytes); // what is read before it is written shows
    }
    return {memory, memory, &std::free, the_device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
} device_memory;

std::mutex pinned_lock;
std::set<const void*> pinned_blocks;

struct PinnedMemory final : c10::Allocator {
  static void release(void* memory) {
    std::lock_guard<std::mutex> lock(pinned_lock);
    pinned_blocks.erase(memory);
    std::free(memory);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    TORCH_CHECK(!posix_memalign(&memory, 64, bytes + 1), "out of memory");
    std::lock_guard<std::mutex> lock(pinned_lock);
    pinned_blocks.insert(memory);
    return {memory, memory, &release, host};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
} pinned_memory;

bool is_pinned_memory(const void* memory) {
  std::lock_guard<std::mutex> lock(pinned_lock);
  return pinned_blocks.count(memory) > 0;
}

void release_storage(void* storage) { delete static_cast<c10::Storage*>(storage); }

// The same memory, sizes and strides as a tensor of another device.
Tensor relabel(const Tensor& tensor, Device device) {
  if (!tensor.defined() || tensor.device().type() == device.type())
    return tensor;
  c10::Allocator* allocator = c10::GetCPUAllocator();
  auto key = DispatchKey::CPU;
  if (device.type() == device_type) {
    check_dtype(tensor.scalar_type());
    allocator = &device_memory;
    key = DispatchKey::PrivateUse1;
  }
  auto* owner = new c10::Storage(tensor.storage()); // lives as long as the new tensor
  c10::DataPtr memory(owner->mutable_data(), owner, &release_storage, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), owner->nbytes(),
                       std::move(memory), allocator, /*resizable=*/true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), DispatchKeySet(key), tensor.dtype());
  auto* bare = result.unsafeGetTensorImpl();
  bare->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                              tensor.storage_offset());
  if (tensor.is_conj())
    result._set_conj(true);
  if (tensor.is_neg())
    result._set_neg(true);
  return result;
}

// ----------------------------------------------------------------------- random numbers

// The engine of the device. Its label is the host's, because the CPU's kernels draw
// from it.
at::Generator& engine() {
  static at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(1);
  return generator;
}

struct DeviceGenerator final : at::CPUGeneratorImpl {
  DeviceGenerator() {
    device_ = the_device;
    key_set_ = DispatchKeySet(DispatchKey::PrivateUse1);
  }
};

// ----------------------------------------------------------------- what PyTorch asks for

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream only_stream() {
    return c10::Stream(c10::Stream::DEFAULT, the_device);
  }
  c10::DeviceType type() const override { return device_type; }
  Device exchangeDevice(Device) const override { return the_device; }
  Device getDevice() const override { return the_device; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device) const override { return only_stream(); }
  c10::Stream getDefaultStream(Device) const override { return only_stream(); }
  c10::Stream getNewStream(Device, int) const override { return only_stream(); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    *event = nullptr;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const c10::Stream&) const override {
    report("stall", "synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    report("stall", "synchronize");
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  Device getDeviceFromPtr(void*) const override { return the_device; }
  bool isPinnedPtr(const void* memory) const override {
    return is_pinned_memory(memory);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<DeviceGenerator>();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator generator = at::make_generator<DeviceGenerator>();
    return generator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto memory = device_memory.allocate(bytes);
    if (bytes && storage.nbytes())
      memcpy(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
} hooks;

// ----------------------------------------------------------- operations that move nothing

using Size = c10::IntArrayRef;
using SymSize = c10::SymIntArrayRef;
template <class T> using Maybe = std::optional<T>;

Tensor empty(Size sizes, Maybe<at::ScalarType> dtype, Maybe<at::Layout>, Maybe<Device>,
             Maybe<bool>, Maybe<at::MemoryFormat> format) {
  auto type = c10::dtype_or_default(dtype);
  check_dtype(type);
  return at::detail::empty_generic(sizes, &device_memory,
                                   DispatchKeySet(DispatchKey::PrivateUse1), type,
                                   format);
}
Tensor empty_strided(Size sizes, Size strides, Maybe<at::ScalarType> dtype,
                     Maybe<at::Layout>, Maybe<Device>, Maybe<bool>) {
  auto type = c10::dtype_or_default(dtype);
  check_dtype(type);
  return at::detail::empty_strided_generic(sizes, strides, &device_memory,
                                           DispatchKeySet(DispatchKey::PrivateUse1),
                                           type);
}
Tensor as_strided(const Tensor& self, SymSize sizes, SymSize strides,
                  Maybe<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, sizes, strides, offset);
}
Tensor view(const Tensor& self, SymSize sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}
Tensor reshape_alias(const Tensor& self, SymSize sizes, SymSize strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes),
                                    C10_AS_INTARRAYREF_SLOW(strides));
}
const Tensor& resize(const Tensor& self, SymSize sizes, Maybe<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(sizes), format);
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}
Tensor& set_storage(Tensor& self, at::Storage source) {
  return at::native::set_(self, source);
}
Tensor& set_storage_at(Tensor& self, at::Storage source, int64_t offset, Size sizes,
                       Size strides) {
  return at::cpu::set_(self, source, offset, sizes, strides);
}

// ------------------------------------------------------------------------------- copies

// A GPU's program waits for copies to the host, and for copies out of memory that is
// not pinned. It does not wait for non_blocking ones of pinned memory.
void report_copy(const Tensor& from, const Tensor& to, bool non_blocking) {
  int64_t bytes = from.nbytes();
  bool out = from.device().type() == device_type && to.is_cpu();
  bool in = from.is_cpu() && to.device().type() == device_type;
  if (out)
    report(non_blocking && to.is_pinned() ? "copy out" : "stall", "copy to host", bytes);
  else if (in)
    report(non_blocking && from.is_pinned() ? "copy in" : "waited copy in",
           "copy to device", bytes);
  else
    report("kernel", "copy", bytes);
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  report_copy(from, to, non_blocking);
  Silence ours;
  at::NoGradGuard no_grad;
  relabel(to, host).copy_(relabel(from, host));
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}
at::Scalar item(const Tensor& self) {
  report("stall", "item", self.nbytes());
  Silence ours;
  return at::_local_scalar_dense(relabel(self, host));
}
bool is_pinned(const Tensor& self, Maybe<Device>) {
  return is_pinned_memory(self.storage().data());
}

// ----------------------------------------------------------- every operation that counts

bool contains(const std::set<std::string>& names, const std::string& name) {
  return names.count(name) > 0;
}
// CUDA takes indices and lengths on the host in these, and only in these.
const std::set<std::string> mixing = {
    "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_",
    "aten::_index_put_impl_", "aten::copy_", "aten::_pack_padded_sequence"};
// The size of their result is not known before they have run.
const std::set<std::string> waiting = {
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive",
    "aten::bincount", "aten::equal", "aten::multinomial", "aten::histc",
    "aten::repeat_interleave", "aten::linalg_lstsq"};

struct Arguments {
  int on_device = 0, on_host = 0;
  bool mask_as_index = false;

  void see(const Tensor& tensor, bool in_list) {
    if (!tensor.defined())
      return;
    if (tensor.device().type() == device_type) {
      ++on_device;
      auto dtype = tensor.scalar_type();
      mask_as_index |= in_list && (dtype == at::kBool || dtype == at::kByte);
    } else if (tensor.is_cpu() && tensor.dim() > 0) {
      ++on_host; // a number may be on the host
    }
  }
};

template <class F> void each_tensor(const c10::IValue& value, F&& use) {
  if (value.isTensor())
    use(value.toTensor(), false);
  else if (value.isList())
    for (const c10::IValue& entry : value.toListRef())
      if (entry.isTensor())
        use(entry.toTensor(), true);
}
template <class F> c10::IValue with_tensors(const c10::IValue& value, F&& change) {
  if (value.isTensor())
    return change(value.toTensor());
  if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (Tensor& tensor : tensors)
      tensor = change(tensor);
    return tensors;
  }
  if (value.isList()) { // of tensors that may be missing
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i)
      if (c10::IValue entry = list.get(i); entry.isTensor())
        list.set(i, change(entry.toTensor()));
    return list;
  }
  return value;
}

void check_and_report(const c10::FunctionSchema& schema,
                      c10::ArrayRef<c10::IValue> arguments) {
  const std::string& name = schema.name();
  Arguments seen;
  for (const auto& value : arguments)
    each_tensor(value, [&](const Tensor& t, bool in_list) { seen.see(t, in_list); });
  if (seen.on_device && seen.on_host) {
    TORCH_CHECK(contains(mixing, name),
                "Expected all tensors to be on the same device, but found at least two "
                "devices, seconddevice:0 and cpu! (", name, ")");
    report("waited copy in", name + " with an index on the host");
  }
  bool index = name.find("index") != std::string::npos;
  // filling where a mask is true needs no count of it
  bool filling = name.find("put") != std::string::npos && arguments.size() > 2 &&
                 arguments[2].isTensor() && arguments[2].toTensor().numel() == 1;
  bool counted = index && seen.mask_as_index && !filling;
  report(counted || contains(waiting, name) ? "stall" : "kernel", name);
}

// The tensors of one operation, and the same memory as tensors of the host.
struct Relabelled {
  std::vector<Tensor> ours, hosts;

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != device_type)
      return tensor;
    for (size_t i = 0; i < ours.size(); ++i)
      if (ours[i].is_same(tensor))
        return hosts[i];
    ours.push_back(tensor);
    hosts.push_back(relabel(tensor, host));
    return hosts.back();
  }
  // An `out=` argument that the operation has given other sizes or other memory.
  void take_over_changes() {
    for (size_t i = 0; i < ours.size(); ++i) {
      bool moved = ours[i].storage().data() != hosts[i].storage().data();
      if (!moved && ours[i].sizes() == hosts[i].sizes())
        continue;
      auto changed = relabel(hosts[i], the_device);
      auto* bare = ours[i].unsafeGetTensorImpl();
      bare->set_storage_keep_dtype(changed.storage());
      bare->set_sizes_and_strides(changed.sizes(), changed.strides(),
                                  changed.storage_offset());
    }
  }
  Tensor to_device(const Tensor& result) {
    if (!result.defined() || !result.is_cpu())
      return result;
    for (size_t i = 0; i < ours.size(); ++i) {
      if (hosts[i].is_same(result))
        return ours[i];
      bool view = result.numel() && result.is_alias_of(hosts[i]);
      if (view && result.dtype() == ours[i].dtype())
        return at::cpu::as_strided(ours[i], result.sizes(), result.strides(),
                                   result.storage_offset());
    }
    return relabel(result, the_device);
  }
};

void run_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const size_t arguments = schema.arguments().size(), first = stack->size() - arguments;
  check_and_report(schema, c10::ArrayRef<c10::IValue>(*stack).slice(first));

  Silence ours;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Relabelled tensors;
  auto to_host = [&](const Tensor& tensor) { return tensors.to_host(tensor); };
  for (size_t i = 0; i < arguments; ++i) {
    auto& value = (*stack)[first + i];
    auto type = schema.arguments()[i].type();
    if (type->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get())))
      value = engine();
    else if (value.isDevice() && value.toDevice().type() == device_type)
      value = host;
    else
      value = with_tensors(value, to_host);
  }
  operation.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  tensors.take_over_changes();
  auto to_device = [&](const Tensor& tensor) { return tensors.to_device(tensor); };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = with_tensors((*stack)[i], to_device);
}

// ------------------------------------------------- operations that only devices are asked

// PyTorch asks every device but the CPU for an LSTM cell in one kernel.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& from_input, const Tensor& from_hidden, const Tensor& cell,
    const Maybe<Tensor>& input_bias, const Maybe<Tensor>& hidden_bias) {
  report("kernel", "lstm cell");
  Silence ours;
  at::NoGradGuard no_grad;
  Tensor sums = relabel(from_input, host) + relabel(from_hidden, host);
  for (const auto& bias : {input_bias, hidden_bias})
    if (bias && bias->defined())
      sums += relabel(*bias, host);
  auto gate = sums.chunk(4, 1);
  Tensor gates = at::stack({gate[0].sigmoid(), gate[1].sigmoid(), gate[2].tanh(),
                            gate[3].sigmoid()});
  Tensor new_cell = gates[1] * relabel(cell, host) + gates[0] * gates[2];
  Tensor hidden = gates[3] * new_cell.tanh();
  return {relabel(hidden, the_device), relabel(new_cell, the_device),
          relabel(gates, the_device)};
}
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const Maybe<Tensor>& hidden_gradient, const Maybe<Tensor>& cell_gradient,
    const Tensor& old_cell, const Tensor& new_cell, const Tensor& kept, bool has_bias) {
  report("kernel", "lstm cell backward");
  Silence ours;
  at::NoGradGuard no_grad;
  Tensor gates = relabel(kept, host), before = relabel(old_cell, host);
  Tensor squashed = relabel(new_cell, host).tanh();
  Tensor to_cell = at::zeros_like(before), to_hidden = at::zeros_like(before);
  if (hidden_gradient && hidden_gradient->defined())
    to_hidden += relabel(*hidden_gradient, host);
  if (cell_gradient && cell_gradient->defined())
    to_cell += relabel(*cell_gradient, host);
  to_cell += to_hidden * gates[3] * (1 - squashed.square());
  auto by_sigmoid = [](const Tensor& gate) { return gate * (1 - gate); };
  Tensor to_sums = at::cat({to_cell * gates[2] * by_sigmoid(gates[0]),
                            to_cell * before * by_sigmoid(gates[1]),
                            to_cell * gates[0] * (1 - gates[2].square()),
                            to_hidden * squashed * by_sigmoid(gates[3])}, 1);
  Tensor to_bias = has_bias ? to_sums.sum(0) : Tensor();
  return {relabel(to_sums, the_device), relabel(to_cell * gates[1], the_device),
          relabel(to_bias, the_device)};
}
// Lengths, and the sizes of the batches that come of them, are on the host.
std::tuple<Tensor, Tensor> pack_padded(const Tensor& input, const Tensor& lengths,
                                       bool batch_first) {
  TORCH_CHECK(lengths.is_cpu(), "'lengths' argument should be a 1D CPU int64 tensor, "
                                "but got 1D ", lengths.device(), " tensor");
  report("kernel", "aten::_pack_padded_sequence");
  Silence ours;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto [data, sizes] = at::_pack_padded_sequence(relabel(input, host), lengths,
                                                 batch_first);
  return {relabel(data, the_device), sizes};
}
Tensor pack_padded_backward(const Tensor& gradient, SymSize size, const Tensor& sizes,
                            bool batch_first) {
  report("kernel", "aten::_pack_padded_sequence_backward");
  Silence ours;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return relabel(at::_pack_padded_sequence_backward_symint(
                     relabel(gradient, host), size, sizes, batch_first), the_device);
}

// -------------------------------------------------------------------------- registration

auto boxed = torch::CppFunction::makeFromBoxedFunction<&run_on_host>;

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(boxed()); }
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_at);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("is_pinned", is_pinned);
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library.impl("_pack_padded_sequence", pack_padded);
  library.impl("_pack_padded_sequence_backward", pack_padded_backward);
  // the generic kernels of these three refuse a number that is on the host
  for (auto name : {"add.Tensor", "sub.Tensor", "mul.Tensor"})
    library.impl(name, boxed());
}
#define IN_16_BITS(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_32_BITS(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(IN_16_BITS)
  AT_FORALL_FP32(IN_32_BITS)
  KERNEL_PRIVATEUSEONE(cat, promote)
}

const bool registered = [] {
  c10::SetAllocator(device_type, &device_memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::register_privateuse1_backend("seconddevice");
  return true;
}();

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("report_to", [](py::object function) {
    delete report_to;
    report_to = function.is_none() ? nullptr : new py::object(function);
  });
  module.def("refuse_float64", [](bool refused) { float64_refused = refused; });
  module.def("manual_seed", [](uint64_t seed) { engine().set_current_seed(seed); });
  module.def("get_rng_state", [] { return engine().get_state(); });
  module.def("set_rng_state", [](const Tensor& state) { engine().set_state(state); });
}
