package dev.flare.cli;

import static org.assertj.core.api.Assertions.assertThat;

import java.util.List;
import org.jspecify.annotations.Nullable;
import org.junit.jupiter.api.Test;

class GpuFindingsTest {
  private static final long GIB = 1L << 30;

  private static List<Finding> findings(
      int capability, long freeBytes, boolean ecc, @Nullable String failure) {
    return GpuFindings.of(
        new GpuFindings.Gpu(
            "cuda:0",
            "NVIDIA H200",
            capability,
            132,
            140 * GIB,
            freeBytes,
            ecc,
            "0000:3b:00.0",
            failure));
  }

  private static List<String> failures(List<Finding> findings) {
    return findings.stream()
        .filter(finding -> finding.level() == Finding.Level.FAIL)
        .peek(finding -> assertThat(finding.remedy()).isNotBlank())
        .map(Finding::what)
        .toList();
  }

  @Test
  void aHealthyHopperHasNothingToMend() {
    List<Finding> findings = findings(90, 139 * GIB, true, null);

    assertThat(findings).allMatch(finding -> finding.level() == Finding.Level.OK);
    assertThat(findings.toString())
        .contains("NVIDIA H200", "9.0", "132", "Hopper kernels", "139.0 GiB free of 140.0");
  }

  @Test
  void olderAndNewerGpusTakeThePortablePath() {
    assertThat(findings(80, 30 * GIB, true, null).getFirst().detail()).contains("8.0", "portable");
    assertThat(findings(120, 30 * GIB, true, null).getFirst().detail())
        .contains("12.0", "portable");
    assertThat(failures(findings(75, 30 * GIB, true, null))).containsExactly("cuda:0");
  }

  @Test
  void whatFailsHasARemedy() {
    assertThat(failures(findings(90, GIB / 2, true, null))).containsExactly("cuda:0 memory");
    assertThat(failures(findings(90, GIB, true, "cuLaunchKernel failed")))
        .containsExactly("cuda:0 works");
    assertThat(failures(GpuFindings.of(new GpuFindings.Unusable("cuda:1", "exclusive"))))
        .containsExactly("cuda:1");
  }

  @Test
  void eccThatIsOffIsToldAndIsNoFailure() {
    List<Finding> findings = findings(90, 139 * GIB, false, null);

    assertThat(failures(findings)).isEmpty();
    assertThat(findings.toString()).contains("nvidia-smi -e 1");
  }

  @Test
  void comparesTheLibrarysCudaWithTheDrivers() {
    String built = "flare 0.1.0, gcc 12.2, CPU backend avx2 avx512, CUDA 13.0 (sm_90a, sm_80)";

    assertThat(GpuFindings.versions(built, "1 GPU(s), driver for CUDA 13.0").level())
        .isEqualTo(Finding.Level.OK);
    assertThat(GpuFindings.versions(built, "1 GPU(s), driver for CUDA 13.2").level())
        .isEqualTo(Finding.Level.OK);
    assertThat(failures(List.of(GpuFindings.versions(built, "1 GPU(s), driver for CUDA 12.8"))))
        .containsExactly("CUDA in libflare");
    assertThat(
            failures(
                List.of(
                    GpuFindings.versions(
                        "flare 0.1.0, no CUDA (no nvcc)", "1 GPU(s), driver for CUDA 13.0"))))
        .containsExactly("CUDA in libflare");
  }

  @Test
  void tellsWhichPairsReachEachOther() {
    List<String> three = List.of("cuda:0", "cuda:1", "cuda:2");

    assertThat(GpuFindings.peers(three.subList(0, 1), (a, b) -> true)).isEmpty();
    assertThat(GpuFindings.peers(three, (a, b) -> true)).hasSize(1);
    assertThat(GpuFindings.peers(three, (a, b) -> a + b < 2).toString())
        .contains("direct: cuda:0 - cuda:1")
        .contains("through the host: cuda:0 - cuda:2, cuda:1 - cuda:2");
  }
}
