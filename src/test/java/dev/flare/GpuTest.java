package dev.flare;

import java.lang.annotation.ElementType;
import java.lang.annotation.Retention;
import java.lang.annotation.RetentionPolicy;
import java.lang.annotation.Target;
import org.junit.jupiter.api.Tag;
import org.junit.jupiter.api.extension.ConditionEvaluationResult;
import org.junit.jupiter.api.extension.ExecutionCondition;
import org.junit.jupiter.api.extension.ExtendWith;
import org.junit.jupiter.api.extension.ExtensionContext;

/** Needs an NVIDIA GPU; skipped with the reason where there is none. Goes with {@code @Test}. */
@Target({ElementType.TYPE, ElementType.METHOD})
@Retention(RetentionPolicy.RUNTIME)
@Tag("gpu")
@ExtendWith(GpuTest.Condition.class)
@interface GpuTest {

  /** Asks {@link Flare#status}. */
  final class Condition implements ExecutionCondition {
    @Override
    public ConditionEvaluationResult evaluateExecutionCondition(ExtensionContext context) {
      return switch (Flare.status().cuda()) {
        case Flare.Ready ready -> ConditionEvaluationResult.enabled(ready.detail());
        case Flare.Missing missing ->
            ConditionEvaluationResult.disabled("no GPU: " + missing.reason());
      };
    }
  }
}
