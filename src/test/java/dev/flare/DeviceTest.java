package dev.flare;

import static org.assertj.core.api.Assertions.assertThat;
import static org.assertj.core.api.Assertions.assertThatThrownBy;

import org.junit.jupiter.api.Test;

class DeviceTest {
  @Test
  void theCpuIsAlwaysThere() {
    assertThat(Device.all()).contains(Device.cpu());
    assertThat(Device.all().getFirst()).isEqualTo(Device.cpu());
    assertThat(Device.cpu()).hasToString("cpu");
    assertThat(Device.cpu().isCpu()).isTrue();
    assertThat(Device.cpu().name()).isNotBlank();
    Device.Memory memory = Device.cpu().memory();
    assertThat(memory.totalBytes()).isGreaterThan(1 << 28);
    assertThat(memory.freeBytes()).isBetween(1L, memory.totalBytes());
    assertThat(Device.all()).contains(Device.best());
  }

  @Test
  void aMissingGpuTellsWhy() {
    assertThatThrownBy(() -> Device.cuda(-1))
        .isInstanceOf(InvalidArgumentException.class)
        .hasMessageContaining("ordinal: got -1");
    if (Flare.status().cuda() instanceof Flare.Missing missing) {
      assertThatThrownBy(() -> Device.cuda(0))
          .isInstanceOf(DeviceException.class)
          .hasMessageContaining(missing.reason())
          .hasMessageContaining(missing.remedy());
    }
  }

  @Test
  void statusIsMeantForPeople() {
    assertThat(Flare.status().toString()).startsWith("library: ").contains("\ncuda: ");
    if (Flare.status().library().isReady()) {
      assertThat(Flare.version()).matches("\\d+\\.\\d+\\.\\d+");
    }
  }

  @Test
  void liveBytesComeAndGo() {
    long before = Device.cpu().liveBytes();
    try (Tensor t = Tensor.zeros(DType.FP32, 1000)) {
      assertThat(Device.cpu().liveBytes() - before).isEqualTo(4000);
      t.slice(0, 0, 10).close();
      assertThat(Device.cpu().liveBytes() - before).isEqualTo(4000);
    }
    assertThat(Device.cpu().liveBytes()).isEqualTo(before);
  }
}
