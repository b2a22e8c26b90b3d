package dev.flare;

import static com.tngtech.archunit.core.domain.JavaClass.Predicates.resideInAPackage;
import static com.tngtech.archunit.core.domain.properties.HasName.Predicates.nameMatching;
import static com.tngtech.archunit.lang.syntax.ArchRuleDefinition.classes;
import static com.tngtech.archunit.lang.syntax.ArchRuleDefinition.methods;
import static com.tngtech.archunit.lang.syntax.ArchRuleDefinition.noClasses;
import static com.tngtech.archunit.library.dependencies.SlicesRuleDefinition.slices;
import static org.assertj.core.api.Assertions.assertThat;

import com.tngtech.archunit.core.domain.JavaClass;
import com.tngtech.archunit.core.domain.JavaClasses;
import com.tngtech.archunit.core.domain.JavaMethodCall;
import com.tngtech.archunit.core.importer.ClassFileImporter;
import com.tngtech.archunit.core.importer.ImportOption;
import com.tngtech.archunit.lang.ArchCondition;
import com.tngtech.archunit.lang.ConditionEvents;
import com.tngtech.archunit.lang.SimpleConditionEvent;
import java.lang.foreign.AddressLayout;
import java.lang.foreign.Arena;
import java.lang.foreign.Linker;
import java.lang.foreign.MemorySegment;
import java.lang.foreign.SymbolLookup;
import java.util.Set;
import org.junit.jupiter.api.Test;

/** The arrows of the house plan, and habits that no compiler checks. */
class ArchitectureTest {
  private static final JavaClasses CLASSES =
      new ClassFileImporter().withImportOption(mainClassesOnly()).importPackages("dev.flare");

  /** Test classes lie beside the main ones, in a folder or a jar of their own. */
  private static ImportOption mainClassesOnly() {
    String main = Flare.class.getProtectionDomain().getCodeSource().getLocation().getPath();
    return location -> location.contains(main);
  }

  /** Calls that need native access, as the JDK marks them. */
  private static final Set<String> RESTRICTED =
      Set.of("downcallHandle", "upcallStub", "reinterpret", "libraryLookup", "withTargetLayout");

  @Test
  void somethingIsLookedAt() {
    assertThat(CLASSES.size()).isGreaterThan(50);
  }

  @Test
  void onlyTheRingTouchesGeneratedBindings() {
    noClasses()
        .that()
        .resideOutsideOfPackages("dev.flare.internal..", "dev.flare.generated..")
        .should()
        .dependOnClassesThat()
        .resideInAPackage("dev.flare.generated..")
        .check(CLASSES);
  }

  @Test
  void theRingKnowsNothingAboveIt() {
    noClasses()
        .that()
        .resideInAnyPackage("dev.flare.internal..", "dev.flare.generated..")
        .should()
        .dependOnClassesThat()
        .resideInAnyPackage(
            "dev.flare", "dev.flare.io..", "dev.flare.cli..", "dev.flare.reference..")
        .check(CLASSES);
  }

  @Test
  void theApiKnowsNothingAboveIt() {
    noClasses()
        .that()
        .resideInAPackage("dev.flare")
        .should()
        .dependOnClassesThat()
        .resideInAnyPackage("dev.flare.io..", "dev.flare.cli..", "dev.flare.reference..")
        .check(CLASSES);
  }

  @Test
  void referencesStandAlone() {
    noClasses()
        .that()
        .resideInAPackage("dev.flare.reference..")
        .should()
        .dependOnClassesThat(
            resideInAPackage("dev.flare..").and(resideInAPackage("dev.flare.reference..").negate()))
        .check(CLASSES);
  }

  @Test
  void packagesHaveNoCycles() {
    slices().matching("dev.flare.(*)..").should().beFreeOfCycles().check(CLASSES);
  }

  @Test
  void restrictedMethodsStayInTheRing() {
    classes()
        .that()
        .resideOutsideOfPackages("dev.flare.internal..", "dev.flare.generated..")
        .should(
            new ArchCondition<JavaClass>("call no restricted method") {
              @Override
              public void check(JavaClass type, ConditionEvents events) {
                for (JavaMethodCall call : type.getMethodCallsFromSelf()) {
                  JavaClass owner = call.getTargetOwner();
                  boolean foreign =
                      owner.isEquivalentTo(Linker.class)
                          || owner.isEquivalentTo(MemorySegment.class)
                          || owner.isEquivalentTo(SymbolLookup.class)
                          || owner.isEquivalentTo(AddressLayout.class);
                  boolean load =
                      owner.isEquivalentTo(System.class)
                          && call.getTarget().getName().startsWith("load");
                  if (load || (foreign && RESTRICTED.contains(call.getTarget().getName()))) {
                    events.add(SimpleConditionEvent.violated(call, call.getDescription()));
                  }
                }
              }
            })
        .check(CLASSES);
  }

  @Test
  void noArenaWaitsForTheCollector() {
    noClasses()
        .that()
        .resideOutsideOfPackage("dev.flare.generated..")
        .and()
        .doNotHaveFullyQualifiedName("dev.flare.internal.Scratch")
        .should()
        .callMethod(Arena.class, "ofAuto")
        .check(CLASSES);
  }

  @Test
  void theLibraryDoesNotPrint() {
    noClasses()
        .that()
        .resideOutsideOfPackages("dev.flare.cli..", "dev.flare.generated..")
        .should()
        .accessField(System.class, "out")
        .orShould()
        .accessField(System.class, "err")
        .check(CLASSES);
  }

  @Test
  void publicMethodsDeclareNoThrowable() {
    methods()
        .that()
        .arePublic()
        .and()
        .areDeclaredInClassesThat(
            resideInAPackage("dev.flare").or(resideInAPackage("dev.flare.internal..")))
        .should()
        .notDeclareThrowableOfType(Throwable.class)
        .andShould()
        .notDeclareThrowableOfType(Exception.class)
        .check(CLASSES);
  }

  @Test
  void headerClassesAreWhole() {
    // jextract splits a header into numbered classes when it grows; importing those breaks later.
    assertThat(CLASSES.that(nameMatching(".*_h_\\d+"))).isEmpty();
    assertThat(CLASSES.that(nameMatching("dev\\.flare\\.generated\\.\\w+\\.\\w+_h"))).hasSize(2);
  }
}
