//! Our declarations of libibverbs and librdmacm have the sizes, offsets and values that the installed headers have.

use std::io::Write;
use std::process::{Command, Stdio};

use landfall_abi::{Field, Layout, constants, functions, layouts, unnamed_constants};

/// The differences in words, none when all is well.
fn differences<T>(all: &[T], of: impl Fn(&T) -> Vec<String>) -> String {
    all.iter().flat_map(of).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_struct_and_union_has_the_size_and_the_offsets_of_the_headers() {
    let all = layouts();
    assert_eq!(differences(&all, Layout::differences), "");
    // The lists are made from the declarations. These have to be in any.
    for (name, fields) in [("ibv_send_wr", 10), ("ibv_wc", 13), ("ibv_qp_attr", 26), ("rdma_cm_event", 5)] {
        let found = all.iter().find(|layout| layout.name == name).expect(name);
        assert_eq!(found.fields.len(), fields, "fields of {name}");
    }
}

#[test]
fn every_constant_has_the_value_of_the_headers() {
    let all = constants();
    let of = |c: &landfall_abi::Constant| {
        (c.ours != c.theirs)
            .then(|| format!("{} is {}, theirs {}", c.name, c.ours, c.theirs))
            .into_iter()
            .collect()
    };
    assert_eq!(differences(&all, of), "");
    for name in ["IBV_WR_RDMA_WRITE_WITH_IMM", "IBV_ACCESS_RELAXED_ORDERING", "RDMA_CM_EVENT_ESTABLISHED"] {
        assert!(all.iter().any(|constant| constant.name == name), "{name}");
    }
}

/// rdma-sys has none of them: the C compiler is asked.
#[test]
fn constants_of_enumerations_without_a_name_have_the_value_of_the_headers() {
    let all = unnamed_constants();
    assert!(all.iter().any(|(name, _)| *name == "IBV_LINK_LAYER_ETHERNET"));
    let mut program = "#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n".to_owned();
    for (name, value) in all {
        program += &format!("_Static_assert({name} == {value}, \"we have {value}\");\n");
    }
    compile(&program).unwrap();
    compile(&program.replace("IBV_LINK_LAYER_ETHERNET == 2", "IBV_LINK_LAYER_ETHERNET == 3")).unwrap_err();
}

fn compile(program: &str) -> Result<(), String> {
    let mut command = Command::new("cc");
    let command =
        command.args(["-fsyntax-only", "-x", "c", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("a C compiler, cc");
    child.stdin.take().unwrap().write_all(program.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

#[test]
fn every_function_has_arguments_of_the_sizes_of_the_headers() {
    let all = functions();
    let of = |f: &landfall_abi::Function| {
        let (ours, theirs) = (&f.ours, &f.theirs);
        (ours != theirs).then(|| format!("{}: {ours:?}, theirs {theirs:?}", f.name)).into_iter().collect()
    };
    assert_eq!(differences(&all, of), "");
    for name in ["ibv_create_qp", "ibv_reg_mr", "rdma_connect"] {
        assert!(all.iter().any(|function| function.name == name), "{name}");
    }
}

/// The comparison can fail, in each of its numbers.
#[test]
fn a_difference_is_found_and_named() {
    let layout = |size, align, offset, field| Layout {
        name: "ibv_sge",
        ours: (size, align),
        theirs: (16, 8),
        fields: vec![Field { name: "lkey", ours: (offset, field), theirs: (12, 4) }],
    };
    assert!(layout(16, 8, 12, 4).differences().is_empty());
    for wrong in [layout(24, 8, 12, 4), layout(16, 4, 12, 4)] {
        let all = wrong.differences();
        assert!(all.len() == 1 && all[0].starts_with("ibv_sge: "), "{all:?}");
    }
    for wrong in [layout(16, 8, 8, 4), layout(16, 8, 12, 2)] {
        let all = wrong.differences();
        assert!(all.len() == 1 && all[0].starts_with("ibv_sge.lkey: "), "{all:?}");
    }
}
