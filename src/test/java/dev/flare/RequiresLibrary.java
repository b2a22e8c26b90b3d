package dev.flare;

import java.lang.annotation.ElementType;
import java.lang.annotation.Retention;
import java.lang.annotation.RetentionPolicy;
import java.lang.annotation.Target;
import org.junit.jupiter.api.extension.ConditionEvaluationResult;
import org.junit.jupiter.api.extension.ExecutionCondition;
import org.junit.jupiter.api.extension.ExtendWith;
import org.junit.jupiter.api.extension.ExtensionContext;

/** Needs libflare; skipped with the reason where it is not usable. */
@Target({ElementType.TYPE, ElementType.METHOD})
@Retention(RetentionPolicy.RUNTIME)
@ExtendWith(RequiresLibrary.Condition.class)
@interface RequiresLibrary {

  /** Asks {@link Flare#status}. */
  final class Condition implements ExecutionCondition {
    @Override
    public ConditionEvaluationResult evaluateExecutionCondition(ExtensionContext context) {
      return switch (Flare.status().library()) {
        case Flare.Ready ready -> ConditionEvaluationResult.enabled(ready.detail());
        case Flare.Missing missing ->
            ConditionEvaluationResult.disabled(
                "libflare: " + missing.reason() + "; " + missing.remedy());
      };
    }
  }
}
