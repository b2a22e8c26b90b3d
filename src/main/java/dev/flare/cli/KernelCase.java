package dev.flare.cli;

import dev.flare.reference.Precision;
import dev.flare.reference.Tolerances;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Optional;
import org.jspecify.annotations.Nullable;

/**
 * One call of an operation as plain numbers: what a golden file holds, and what {@code flare
 * verify} makes up.
 *
 * <p>Immutable but for the arrays, which nobody changes.
 *
 * @param name of the case, for people
 * @param kind the operation and the form of its inputs
 * @param mask what a table shows beside the kernel: mask or gate
 * @param options numbers, flags and texts by the names of the golden files' format
 * @param tensors inputs by the names of the golden files' format
 */
record KernelCase(
    String name,
    Kind kind,
    String mask,
    Map<String, Object> options,
    Map<String, CaseTensor> tensors) {

  /** The values of the golden files' {@code kernel}, and the decode form of KDA. */
  enum Kind {
    ATTENTION("attention", Tolerances.Operation.ATTENTION),
    ATTENTION_VARLEN("attention_varlen", Tolerances.Operation.ATTENTION),
    ATTENTION_PAGED("attention_paged", Tolerances.Operation.ATTENTION),
    MLA("mla", Tolerances.Operation.MLA),
    MLA_ABSORBED_PAGED("mla_absorbed_paged", Tolerances.Operation.MLA),
    KDA("kda", Tolerances.Operation.KDA),
    KDA_DECODE("kda_decode", Tolerances.Operation.KDA);

    private final String text;
    private final Tolerances.Operation operation;

    Kind(String text, Tolerances.Operation operation) {
      this.text = text;
      this.operation = operation;
    }

    static Optional<Kind> of(String text) {
      return Arrays.stream(values()).filter(kind -> kind.text.equals(text)).findFirst();
    }

    String text() {
      return text;
    }
  }

  /** {@return the input of a name} */
  CaseTensor tensor(String tensorName) {
    CaseTensor tensor = tensors.get(tensorName);
    if (tensor == null) {
      throw new IllegalArgumentException(
          name + ": a case of kernel '" + kind.text + "' needs the tensor '" + tensorName + "'");
    }
    return tensor;
  }

  Optional<CaseTensor> find(String tensorName) {
    return Optional.ofNullable(tensors.get(tensorName));
  }

  /** {@return the format of the data, q's} */
  Precision precision() {
    return tensor(kind == Kind.MLA ? "q_nope" : "q").precision();
  }

  boolean flag(String option) {
    Object value = options.get(option);
    if (value == null) {
      return false;
    }
    if (value instanceof Boolean flag) {
      return flag;
    }
    throw wrong(option, value, "true or false");
  }

  double number(String option, double neutral) {
    Object value = options.get(option);
    if (value == null) {
      return neutral;
    }
    if (value instanceof Number number) {
      return number.doubleValue();
    }
    throw wrong(option, value, "a number");
  }

  String text(String option, String neutral) {
    Object value = options.get(option);
    if (value == null) {
      return neutral;
    }
    if (value instanceof String text) {
      return text;
    }
    throw wrong(option, value, "a text");
  }

  /** {@return the bounds of the window, left then right; -1 is none} */
  int[] window() {
    Object value = options.get("window");
    if (value == null) {
      return new int[] {-1, -1};
    }
    if (value instanceof Iterable<?> sides) {
      int[] window = new int[2];
      int i = 0;
      for (Object side : sides) {
        if (i == 2
            || !(side instanceof Number number)
            || number.intValue() != number.doubleValue()) {
          throw wrong("window", value, "two integers");
        }
        window[i++] = number.intValue();
      }
      if (i == 2) {
        return window;
      }
    }
    throw wrong("window", value, "two integers");
  }

  /** {@return what the relative error of a tensor of the result may be at most} */
  double relativeTolerance() {
    boolean collinear = name.contains("collinear") && precision() == Precision.BF16;
    return Tolerances.relative(
        collinear ? Tolerances.Operation.KDA_COLLINEAR : kind.operation, precision());
  }

  /** {@return the sizes of the inputs that a table shows} */
  String shape() {
    Map<String, Object> sizes = new LinkedHashMap<>();
    int[] q = tensor(kind == Kind.MLA ? "q_nope" : "q").shape();
    switch (kind) {
      case ATTENTION -> {
        sizes.put("B", q[0]);
        sizes.put("N", q[1]);
        int[] k = tensor("k").shape();
        if (k[1] != q[1]) {
          sizes.put("Nk", k[1]);
        }
        sizes.put("H", q[2]);
        if (k[2] != q[2]) {
          sizes.put("Hk", k[2]);
        }
        sizes.put("D", width(q[3]));
      }
      case ATTENTION_VARLEN -> {
        sizes.put("T", q[0]);
        sizes.put("seqs", tensor("cu_seqlens_q").shape()[0] - 1);
        sizes.put("H", q[1]);
        sizes.put("D", width(q[2]));
      }
      case ATTENTION_PAGED -> {
        sizes.put("B", q[0]);
        sizes.put("N", q[1]);
        sizes.put("Nk", Arrays.stream(tensor("seqlens_k").toInts()).max().orElse(0));
        sizes.put("H", q[2]);
        sizes.put("D", width(q[3]));
        sizes.put("page", tensor("k_pages").shape()[1]);
      }
      case MLA -> {
        sizes.put("B", q[0]);
        sizes.put("N", q[1]);
        sizes.put("Nk", tensor("c_kv").shape()[1]);
        sizes.put("H", q[2]);
        sizes.put("D", width(q[3]));
        sizes.put("dc", tensor("c_kv").shape()[2]);
      }
      case MLA_ABSORBED_PAGED -> {
        sizes.put("B", q[0]);
        sizes.put("N", q[1]);
        sizes.put("Nk", Arrays.stream(tensor("seqlens_k").toInts()).max().orElse(0));
        sizes.put("H", q[2]);
        sizes.put("D", width(q[3]));
        sizes.put("page", tensor("kv_pages").shape()[1]);
      }
      case KDA, KDA_DECODE -> {
        sizes.put("B", q[0]);
        sizes.put("T", q[1]);
        sizes.put("H", q[2]);
        int[] v = tensor("v").shape();
        if (v[2] != q[2]) {
          sizes.put("HV", v[2]);
        }
        sizes.put("D", width(q[3]));
      }
    }
    StringBuilder text = new StringBuilder();
    sizes.forEach(
        (size, value) -> text.append(text.isEmpty() ? "" : " ").append(size).append(value));
    return text.toString();
  }

  /** {@return the shape of a tensor of the result: out, lse or final_state} */
  long[] resultShape(String result) {
    int[] q = tensor(kind == Kind.MLA ? "q_nope" : "q").shape();
    return switch (result) {
      case "out" -> {
        long[] shape = Arrays.stream(q).asLongStream().toArray();
        shape[shape.length - 1] = valueDim();
        if (kind == Kind.KDA || kind == Kind.KDA_DECODE) {
          shape[2] = tensor("v").shape()[2];
        }
        yield shape;
      }
      case "lse" ->
          kind == Kind.ATTENTION_VARLEN ? new long[] {q[1], q[0]} : new long[] {q[0], q[2], q[1]};
      case "final_state" -> {
        int[] v = tensor("v").shape();
        boolean valueFirst = "V,K".equals(text("state_layout", "K,V"));
        int sequences = find("cu_seqlens").map(cu -> cu.shape()[0] - 1).orElse(q[0]);
        yield new long[] {sequences, v[2], valueFirst ? v[3] : q[3], valueFirst ? q[3] : v[3]};
      }
      default -> throw new IllegalArgumentException(name + ": no result '" + result + "'");
    };
  }

  /** Width of queries and keys, with that of the values where it is another. */
  private String width(int dim) {
    return dim == valueDim() ? String.valueOf(dim) : dim + "/" + valueDim();
  }

  private int valueDim() {
    return switch (kind) {
      case ATTENTION, ATTENTION_VARLEN, KDA, KDA_DECODE -> last("v");
      case ATTENTION_PAGED -> last("v_pages");
      case MLA -> last("w_uv");
      case MLA_ABSORBED_PAGED -> (int) number("d_c", 512);
    };
  }

  private int last(String tensorName) {
    int[] shape = tensor(tensorName).shape();
    return shape[shape.length - 1];
  }

  /** {@return the error of an option whose text is none of {@code want}} */
  IllegalArgumentException wrongText(String option, String want) {
    return wrong(option, options.get(option), want);
  }

  private IllegalArgumentException wrong(String option, @Nullable Object value, String want) {
    return new IllegalArgumentException(
        name + ": option '" + option + "' is " + value + ", want " + want);
  }
}
