// A pretend accelerator: tensors live in memory that the host may not touch, operators run on the CPU over copies.
//
// What it checks, as a real accelerator would or worse: tensors of different devices do not mix, nobody reads device
// memory without a copy (the pages are protected), and no stream reads or writes what another stream has written
// without being ordered after it (vector clocks).

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>

namespace pretend {

constexpr int kDevices = 4;
constexpr auto kType = c10::DeviceType::PrivateUse1;

// ---- which stream has seen what -------------------------------------------------------------------------------

using StreamKey = std::pair<int, int64_t>;  // device, number
using Clock = std::map<StreamKey, uint64_t>;

struct Access {
  StreamKey stream;
  uint64_t time;
};

struct Block {
  size_t bytes;
  std::vector<Access> write;  // the last one
  std::vector<Access> reads;  // since
};

std::recursive_mutex lock;
std::map<StreamKey, Clock> clocks;
Clock host;
std::map<uintptr_t, Block> blocks;
std::set<const void*> pinned;
std::atomic<int64_t> next_stream{1};
thread_local int current_device = 0;
thread_local int64_t current_stream[kDevices] = {};
thread_local bool in_operator = false;  // copies that only pretend to compute do not make the host wait

void merge(Clock& into, const Clock& from) {
  for (const auto& [stream, time] : from) into[stream] = std::max(into[stream], time);
}

StreamKey here(int device) { return {device, current_stream[device]}; }

Block* find(const void* data) {
  auto place = blocks.upper_bound(reinterpret_cast<uintptr_t>(data));
  if (place == blocks.begin()) return nullptr;
  --place;
  auto inside = reinterpret_cast<uintptr_t>(data) < place->first + place->second.bytes;
  return inside ? &place->second : nullptr;
}

bool ordered(const Clock& clock, const Access& access) {
  auto found = clock.find(access.stream);
  return found != clock.end() && found->second >= access.time;
}

void touch(const at::Tensor& tensor, bool writes, const char* what) {
  if (!tensor.defined() || tensor.device().type() != kType || !tensor.has_storage() || tensor.numel() == 0) return;
  std::lock_guard<std::recursive_mutex> guard(lock);
  Block* block = find(tensor.storage().data());
  if (block == nullptr) return;
  StreamKey stream = here(tensor.device().index());
  Clock& clock = clocks[stream];
  merge(clock, host);
  uint64_t now = ++clock[stream];
  for (const auto& write : block->write)
    TORCH_CHECK(
        write.stream == stream || ordered(clock, write), "pretend: ", what, " on stream ", stream.second,
        " of device ", stream.first, writes ? " writes" : " reads", " memory that stream ", write.stream.second,
        " of device ", write.stream.first, " has written, and nothing orders it after that write.");
  if (writes) {
    for (const auto& read : block->reads)
      TORCH_CHECK(
          read.stream == stream || ordered(clock, read), "pretend: ", what, " on stream ", stream.second,
          " of device ", stream.first, " writes memory that stream ", read.stream.second, " of device ",
          read.stream.first, " may still read: nothing orders it after that read.");
    block->write = {{stream, now}};
    block->reads.clear();
  } else {
    block->reads.push_back({stream, now});
    if (block->reads.size() > 64) block->reads.erase(block->reads.begin());
  }
}

void host_waits(int device) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  merge(host, clocks[here(device)]);
}

// ---- memory -----------------------------------------------------------------------------------------------------

size_t pages(size_t bytes) { return (std::max<size_t>(bytes, 1) + 4095) / 4096 * 4096; }

class Opened {  // the host may touch a block as long as this lives
 public:
  explicit Opened(const void* data) : guard_(lock) {
    auto place = blocks.upper_bound(reinterpret_cast<uintptr_t>(data));
    if (place == blocks.begin()) return;
    --place;
    start_ = reinterpret_cast<void*>(place->first);
    bytes_ = pages(place->second.bytes);
    mprotect(start_, bytes_, PROT_READ | PROT_WRITE);
  }
  ~Opened() {
    if (start_ != nullptr) mprotect(start_, bytes_, PROT_NONE);
  }

 private:
  std::lock_guard<std::recursive_mutex> guard_;
  void* start_ = nullptr;
  size_t bytes_ = 0;
};

void release(void* data) {
  std::lock_guard<std::recursive_mutex> guard(lock);
  auto place = blocks.find(reinterpret_cast<uintptr_t>(data));
  if (place == blocks.end()) return;
  munmap(data, pages(place->second.bytes));
  blocks.erase(place);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kType, current_device);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    void* data = mmap(nullptr, pages(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(data != MAP_FAILED, "pretend: out of memory");
    std::lock_guard<std::recursive_mutex> guard(lock);
    blocks[reinterpret_cast<uintptr_t>(data)] = Block{bytes, {}, {}};
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override {
    Opened first(to), second(from);
    std::memcpy(to, from, count);
  }
};

Memory memory;
REGISTER_ALLOCATOR(kType, &memory);

// ---- devices, streams, events -------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "pretend: there is no device ", device.index());
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    int index = device.index() < 0 ? current_device : device.index();
    return make(index, current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make(device.index() < 0 ? current_device : device.index(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return make(device.index() < 0 ? current_device : device.index(), next_stream++);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStreamFromGlobalPool(device, false); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream old = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (*event == nullptr) *event = new Clock();
    Clock& clock = clocks[key(stream)];
    merge(clock, host);
    ++clock[key(stream)];
    *static_cast<Clock*>(*event) = clock;
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (event != nullptr) merge(clocks[key(stream)], *static_cast<Clock*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (event != nullptr) merge(host, *static_cast<Clock*>(event));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    merge(host, clocks[key(stream)]);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    for (const auto& [stream, clock] : clocks)
      if (stream.first == device) merge(host, clock);
  }

 private:
  static StreamKey key(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
  static c10::Stream make(int device, int64_t number) {
    c10::Device where(kType, static_cast<c10::DeviceIndex>(device));
    return c10::Stream(c10::Stream::UNSAFE, where, number);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- random numbers -------------------------------------------------------------------------------------------------

struct PretendGenerator final : at::CPUGeneratorImpl {  // the CPU's numbers, a state for each device
  explicit PretendGenerator(c10::DeviceIndex index) : at::CPUGeneratorImpl() {
    device_ = c10::Device(kType, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

at::Generator& default_generator(int index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kDevices; ++i) made.push_back(at::make_generator<PretendGenerator>(i));
    return made;
  }();
  return all.at(index < 0 ? current_device : index);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::malloc(std::max<size_t>(bytes, 1));
    std::lock_guard<std::recursive_mutex> guard(lock);
    pinned.insert(data);
    return {data, data, &drop, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
  static void drop(void* data) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    pinned.erase(data);
    std::free(data);
  }
};

Pinned pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current_device, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<PretendGenerator>(index < 0 ? current_device : index);
  }
  c10::Device getDeviceFromPtr(void*) const override { return {kType, static_cast<c10::DeviceIndex>(current_device)}; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::recursive_mutex> guard(lock);
    return pinned.count(data) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr larger = memory.allocate(bytes);
    if (storage.nbytes() > 0 && bytes > 0) memory.copy_data(larger.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

// ---- operators --------------------------------------------------------------------------------------------------------

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kType, current_device)));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kType, current_device)));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}

at::Tensor on_host(const at::Tensor& tensor, bool writes) {  // over the same memory
  if (tensor.device().is_cpu()) return tensor;
  void* data = tensor.numel() == 0 ? nullptr
      : writes                     ? tensor.mutable_data_ptr()
                                   : const_cast<void*>(tensor.const_data_ptr());
  auto made = at::from_blob(data, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  if (tensor.is_conj()) made = made.conj();
  return tensor.is_neg() ? made._neg_view() : made;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.device().type() == kType && to.device().type() == kType && from.device() != to.device()) {
    std::lock_guard<std::recursive_mutex> guard(lock);  // torch orders both streams around such a copy
    Clock both = clocks[here(from.device().index())];
    merge(both, clocks[here(to.device().index())]);
    clocks[here(from.device().index())] = clocks[here(to.device().index())] = both;
  }
  touch(from, false, "copy");
  touch(to, true, "copy");
  if (from.device().type() == kType && to.device().type() == kType && from.device() != to.device()) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    merge(clocks[here(to.device().index())], clocks[here(from.device().index())]);
    merge(clocks[here(from.device().index())], clocks[here(to.device().index())]);
  }
  if (to.numel() == 0) return to;
  c10::InferenceMode no_graph(false);
  at::NoGradGuard no_grad;
  if (to.device().type() == kType) (void)to.mutable_data_ptr();  // what is shared until written is copied now
  // Made and dropped without the lock: one more reference to a tensor that Python knows waits for Python's lock, which a
  // thread may hold that frees memory here.
  at::Tensor target = on_host(to, true);
  const at::Tensor source = on_host(from, false);
  {
    std::lock_guard<std::recursive_mutex> guard(lock);
    Opened first(from.device().type() == kType ? from.const_data_ptr() : nullptr);
    Opened second(to.device().type() == kType ? to.const_data_ptr() : nullptr);
    target.copy_(source);
  }
  if (to.device().is_cpu() && !non_blocking && !in_operator) host_waits(from.device().index());
  return to;
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes) return self;
  auto* inside = self.unsafeGetTensorImpl();
  inside->set_sizes_contiguous(sizes);
  if (format.has_value()) inside->empty_tensor_restride(*format);
  size_t needed = (at::detail::computeStorageNbytes(sizes, self.strides(), self.dtype().itemsize()) +
                   self.storage_offset() * self.dtype().itemsize());
  if (needed > self.storage().nbytes()) {
    c10::DeviceGuard guard(self.device());
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) resize(to, c10::fromIntArrayRefSlow(from.sizes()), std::nullopt);
  return copy_from(from, to, false);
}

// A loss that is reduced gets its output in the size before the reduction: its kernel is to resize it, without a word.
struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("An output with one or more elements was resized") == std::string::npos)
      outer->process(warning);
  }
  c10::WarningHandler* outer = c10::WarningUtils::get_warning_handler();
};

// What all other operators do: check, run on the CPU over copies, copy back.
void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  const std::string name = schema.name();
  const bool indexes = name.find("aten::index") == 0 || name.find("aten::_index") == 0 || name == "aten::_unsafe_index";
  std::optional<c10::Device> device;
  auto check = [&](const at::Tensor& tensor, bool writes) {
    if (!tensor.defined()) return;
    if (tensor.device().type() != kType) {
      TORCH_CHECK(
          tensor.dim() == 0 || indexes || name == "aten::copy_" || name == "aten::_foreach_copy_" || name.find("lengths") != std::string::npos ||
              name == "aten::_pack_padded_sequence" || name.rfind("aten::_foreach_addc", 0) == 0,  // their scalars
          "Expected all tensors to be on the same device, but found at least two devices, ",
          device.has_value() ? device->str() : "pretend", " and ", tensor.device().str(), " (", name, ")");
      return;
    }
    TORCH_CHECK(
        !device.has_value() || *device == tensor.device(),
        "Expected all tensors to be on the same device, but found at least two devices, ",
        device.has_value() ? device->str() : "", " and ", tensor.device().str(), " (", name, ")");
    device = tensor.device();
    touch(tensor, writes, name.c_str());
  };
  std::vector<std::pair<size_t, at::Generator>> lent;
  for (size_t i = 0; i < count; ++i) {
    const auto& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    if (value.isTensor()) check(value.toTensor(), writes);
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) check(tensor, writes);
    if (value.isOptionalTensorList())
      for (const auto& tensor : value.toOptionalTensorVector())
        if (tensor.has_value()) check(*tensor, writes);
  }
  for (size_t i = 0; i < count; ++i) {
    if (schema.arguments()[i].type()->str().find("Generator") == std::string::npos) continue;
    auto& value = (*stack)[first + i];
    at::Generator own = value.isNone() ? default_generator(device.has_value() ? device->index() : -1)
                                       : value.toGenerator();
    TORCH_CHECK(
        own.device().type() == kType, "Expected a 'pretend' device type for generator but found '",
        c10::DeviceTypeName(own.device().type(), true), "'");
    at::Generator cpu = at::make_generator<at::CPUGeneratorImpl>();
    cpu.set_state(own.get_state());
    lent.emplace_back(i, own);
    value = cpu;
  }
  std::vector<at::Generator> used;
  for (const auto& [place, own] : lent) used.push_back((*stack)[first + place].toGenerator());
  c10::DeviceGuard guard(device.value_or(c10::Device(kType, current_device)));
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard handler(&quiet);
  const bool before = in_operator;
  in_operator = name != "aten::_local_scalar_dense" && name != "aten::equal" && name != "aten::nonzero";
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    in_operator = before;
    throw;
  }
  in_operator = before;
  for (size_t i = 0; i < lent.size(); ++i) lent[i].second.set_state(used[i].get_state());
}

at::Tensor cpu(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() ? tensor->cpu() : at::Tensor();
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  at::Tensor noise = at::empty_like(input).bernoulli_(1 - p);
  at::Tensor mask = noise.to(at::kBool);
  if (p < 1) noise.div_(1 - p);
  return {input * noise, mask};
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  return at::convolution_symint(
             cpu(input), cpu(weight), cpu(bias), stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  auto bias = c10::SymInt(weight.size(transposed ? 1 : 0)) * (transposed ? groups : c10::SymInt(1));
  std::vector<c10::SymInt> bias_sizes{bias};
  auto [one, two, three] = at::convolution_backward_symint(
      cpu(grad), cpu(input), cpu(weight), c10::SymIntArrayRef(bias_sizes), stride, padding, dilation, transposed,
      output_padding, groups, mask);
  auto back = [&](const at::Tensor& t) { return t.defined() ? t.to(input.device()) : t; };
  return {back(one), back(two), back(three)};
}

using at::Tensor;
using Maybe = std::optional<Tensor>;

std::tuple<Tensor, Tensor, Tensor> batch_norm(  // its schema does not say that it writes the running statistics
    const Tensor& input, const Maybe& weight, const Maybe& bias, const Maybe& mean, const Maybe& var, bool training,
    double momentum, double eps) {
  Tensor mean_cpu = cpu(mean), var_cpu = cpu(var);
  auto [out, save_mean, save_invstd] =
      at::native_batch_norm(cpu(input), cpu(weight), cpu(bias), mean_cpu, var_cpu, training, momentum, eps);
  if (training && mean_cpu.defined()) {
    at::_copy_from(mean_cpu, *mean);  // nor does it count up their versions
    at::_copy_from(var_cpu, *var);
  }
  auto device = input.device();
  return {out.to(device), save_mean.to(device), save_invstd.to(device)};
}

void record_stream(Tensor& self, c10::Stream stream) {
  c10::Stream before = Guard().exchangeStream(stream);  // what that stream still reads
  touch(self, false, "record_stream");
  Guard().exchangeStream(before);
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input, const Tensor& hidden, const Tensor& cx, const Maybe& input_bias, const Maybe& hidden_bias) {
  Tensor gates = input + hidden;
  if (input_bias.has_value() && input_bias->defined()) gates = gates + *input_bias + *hidden_bias;
  auto part = gates.chunk(4, 1);
  Tensor i = part[0].sigmoid(), f = part[1].sigmoid(), g = part[2].tanh(), o = part[3].sigmoid();
  Tensor cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const Maybe& grad_hy, const Maybe& grad_cy, const Tensor& cx, const Tensor& cy, const Tensor& workspace, bool has_bias) {
  auto part = workspace.chunk(4, 1);
  Tensor i = part[0], f = part[1], g = part[2], o = part[3], t = cy.tanh();
  Tensor gh = grad_hy.has_value() && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  Tensor gc = gh * o * (1 - t * t);
  if (grad_cy.has_value() && grad_cy->defined()) gc = gc + *grad_cy;
  Tensor gates = at::cat({gc * g * i * (1 - i), gc * cx * f * (1 - f), gc * i * (1 - g * g), gh * t * o * (1 - o)}, 1);
  return {gates, gc * f, has_bias ? gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input, const Tensor& hidden, const Tensor& hx, const Maybe& input_bias, const Maybe& hidden_bias) {
  bool bias = input_bias.has_value() && input_bias->defined();
  auto in = (bias ? input + *input_bias : input).chunk(3, 1), hid = (bias ? hidden + *hidden_bias : hidden).chunk(3, 1);
  Tensor r = (in[0] + hid[0]).sigmoid(), z = (in[1] + hid[1]).sigmoid(), n = (in[2] + r * hid[2]).tanh();
  return {(hx - n) * z + n, at::cat({r, z, n, hx, hid[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& workspace, bool has_bias) {
  auto part = workspace.chunk(5, 1);
  Tensor r = part[0], z = part[1], n = part[2], hx = part[3], hn = part[4];
  Tensor gn = grad * (1 - z) * (1 - n * n), gz = grad * (hx - n) * z * (1 - z), gr = gn * hn * r * (1 - r);
  Tensor in = at::cat({gr, gz, gn}, 1), hid = at::cat({gr, gz, gn * r}, 1);
  return {in, hid, grad * z, has_bias ? in.sum(0) : Tensor(), has_bias ? hid.sum(0) : Tensor()};
}

int64_t sdp_choice(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", [](at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) -> at::Tensor& {
    at::native::set_storage_cpu_(self, source, offset, size, stride);
    return self;
  });
  m.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    int64_t count = source.nbytes() / self.dtype().itemsize();
    at::native::set_storage_cpu_(self, source, 0, {count}, {});
    return self;
  });
  m.impl("set_.source_Tensor", [](at::Tensor& self, const at::Tensor& source) -> at::Tensor& {
    at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
    return self;
  });
  m.impl("is_set_to", at::native::is_set_to);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_fused_sdp_choice", sdp_choice);
  m.impl("native_batch_norm", batch_norm);
  m.impl("record_stream", record_stream);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  // As on a GPU, one kernel writes to all tensors of a list, and leaves their version counters as they are.
  for (const c10::OperatorName& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string name = op.name.substr(op.name.find("::") + 2);
    if (op.name.rfind("aten::_foreach_", 0) != 0 || name.back() != '_') continue;
    const std::string full = op.overload_name.empty() ? name : name + "." + op.overload_name;
    m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
  }
}

// A copy out of what is conjugated or negated lazily resolves it itself: resolving is such a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SINGLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(SINGLE)
}

// ---- what Python asks -------------------------------------------------------------------------------------------------

TORCH_LIBRARY(pretend, m) {
  m.def("device_count() -> int", [] { return static_cast<int64_t>(kDevices); });
  m.def("current_device() -> int", [] { return static_cast<int64_t>(current_device); });
  m.def("set_device(int index) -> ()", [](int64_t index) { Guard().setDevice({kType, static_cast<c10::DeviceIndex>(index)}); });
  m.def("blocks() -> int", [] {
    std::lock_guard<std::recursive_mutex> guard(lock);
    return static_cast<int64_t>(blocks.size());
  });
  m.def("get_state(int index) -> Tensor", [](int64_t index) { return default_generator(index).get_state(); });
  m.def("set_state(int index, Tensor state) -> ()", [](int64_t index, const at::Tensor& state) { default_generator(index).set_state(state); });
  m.def("seed(int index, int seed) -> ()", [](int64_t index, int64_t seed) { default_generator(index).set_current_seed(seed); });
}

}  // namespace pretend
