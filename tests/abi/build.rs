//! Writes the comparisons: one for each struct, union, constant and function that our declarations have, so that none
//! can be left out.
//!
//! The declarations are read as text. bindgen and rustfmt have written them, always in the same form; a form that is not
//! known here ends the build.

use std::fmt::Write;
use std::path::Path;

/// Where rdma-sys has another name for a type that has none in C.
const TYPES: [(&str, &str); 16] = [
    ("ibv_gid__bindgen_ty_1", "ibv_gid_global_t"),
    ("ibv_wc__bindgen_ty_1", "imm_data_invalidated_rkey_union_t"),
    ("ibv_send_wr__bindgen_ty_1", "imm_data_invalidated_rkey_union_t"),
    ("ibv_send_wr__bindgen_ty_2", "wr_t"),
    ("ibv_send_wr__bindgen_ty_2__bindgen_ty_1", "rdma_t"),
    ("ibv_send_wr__bindgen_ty_2__bindgen_ty_2", "atomic_t"),
    ("ibv_send_wr__bindgen_ty_2__bindgen_ty_3", "ud_t"),
    ("ibv_send_wr__bindgen_ty_3", "qp_type_t"),
    ("ibv_send_wr__bindgen_ty_3__bindgen_ty_1", "xrc_t"),
    ("ibv_send_wr__bindgen_ty_4", "bind_mw_tso_union_t"),
    ("ibv_send_wr__bindgen_ty_4__bindgen_ty_1", "bind_mw_t"),
    ("ibv_send_wr__bindgen_ty_4__bindgen_ty_2", "tso_t"),
    ("rdma_addr__bindgen_ty_1", "src_addr_union_t"),
    ("rdma_addr__bindgen_ty_2", "dst_addr_union_t"),
    ("rdma_addr__bindgen_ty_3", "addr_union_t"),
    ("rdma_cm_event__bindgen_ty_1", "param_t"),
];

/// The same for fields: type, our name, its name.
const FIELDS: [(&str, &str, &str); 6] = [
    ("ibv_wc", "__bindgen_anon_1", "imm_data_invalidated_rkey_union"),
    ("ibv_send_wr__bindgen_ty_1", "invalidate_rkey", "invalidated_rkey"),
    ("ibv_send_wr", "__bindgen_anon_1", "imm_data_invalidated_rkey_union"),
    ("ibv_send_wr", "__bindgen_anon_2", "bind_mw_tso_union"),
    ("rdma_addr", "__bindgen_anon_1", "src_addr_union"),
    ("rdma_addr", "__bindgen_anon_2", "dst_addr_union"),
];

/// The tables of functions, which are ours.
const TABLES: [&str; 2] = ["LibIbverbs", "LibRdmacm"];
/// Declared without a content: only pointed to.
const POINTED_TO: [&str; 1] = ["ibv_sa_path_rec"];

struct Item {
    name: String,
    fields: Vec<Field>,
}

struct Field {
    name: String,
    /// As it is written, in one line.
    kind: String,
}

fn main() {
    let (mut layouts, mut named, mut unnamed, mut functions) =
        (String::new(), String::new(), String::new(), String::new());
    for file in ["sys.rs", "sys_cm.rs"] {
        let path = Path::new("../../src/provider/verbs").join(file);
        println!("cargo::rerun-if-changed={}", path.display());
        let text = std::fs::read_to_string(&path).expect("our declarations");
        for item in items(&text) {
            if TABLES.contains(&item.name.as_str()) {
                function_table(&item, &mut functions);
            } else {
                layout(&item, &mut layouts);
            }
        }
        for (name, kind) in constants(&text) {
            // Constants of an enumeration without a name: rdma-sys has none of them.
            if kind.starts_with("_bindgen_ty_") {
                writeln!(unnamed, "unnamed!({name}),").unwrap();
            } else {
                writeln!(named, "constant!({kind}, {name}),").unwrap();
            }
        }
    }
    let out = std::env::var_os("OUT_DIR").expect("cargo sets it");
    let write = |file, text| std::fs::write(Path::new(&out).join(file), format!("[\n{text}]\n")).unwrap();
    write("layouts.rs", layouts);
    write("named.rs", named);
    write("unnamed.rs", unnamed);
    write("functions.rs", functions);
    println!("cargo::rerun-if-changed=build.rs");
}

/// Every struct and union, with its public fields.
fn items(text: &str) -> Vec<Item> {
    let mut items = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some(rest) = line.strip_prefix("pub struct ").or(line.strip_prefix("pub union ")) else {
            assert!(!line.contains("pub struct ") && !line.contains("pub union "), "not understood: {line}");
            continue;
        };
        if let Some((name, _)) = rest.split_once('(') {
            assert!(POINTED_TO.contains(&name), "a tuple struct: {line}");
            continue;
        }
        let name = rest.strip_suffix(" {").unwrap_or_else(|| panic!("not understood: {line}")).to_owned();
        let body: Vec<_> = lines.by_ref().take_while(|line| *line != "}").collect();
        items.push(Item { name, fields: fields(&body) });
    }
    items
}

/// A field begins at the first level of indentation and goes on over deeper lines.
fn fields(body: &[&str]) -> Vec<Field> {
    let mut fields: Vec<Field> = Vec::new();
    for line in body {
        match line.strip_prefix("    ").filter(|rest| !rest.starts_with([' ', ')', '>'])) {
            // Of the loader's, or of what is only pointed to.
            Some(rest) if !rest.starts_with("pub ") => {
                assert!(rest.starts_with('_'), "a private field: {line}");
                fields.push(Field { name: String::new(), kind: String::new() });
            }
            Some(rest) => {
                let (name, kind) = rest["pub ".len()..].split_once(':').expect("a field's type");
                fields.push(Field { name: name.to_owned(), kind: kind.trim().to_owned() });
            }
            None => {
                let field = fields.last_mut().expect("a field goes on");
                field.kind += line.trim();
            }
        }
    }
    fields.retain(|field| !field.name.is_empty());
    fields
}

fn constants(text: &str) -> Vec<(&str, &str)> {
    let lines = text.lines().filter_map(|line| line.trim_start().strip_prefix("pub const "));
    lines.map(|rest| rest.split(" = ").next().unwrap().split_once(": ").expect("NAME: TYPE")).collect()
}

fn layout(item: &Item, out: &mut String) {
    let name = &item.name;
    let theirs = TYPES.iter().find(|(ours, _)| ours == name).map_or(name.as_str(), |(_, theirs)| theirs);
    write!(out, "layout!({name}, {theirs}, [").unwrap();
    // What bindgen was told not to look into has its size and its alignment.
    for Field { name: field, .. } in item.fields.iter().filter(|f| f.name != "_bindgen_opaque_blob") {
        let theirs = FIELDS.iter().find(|(ty, ours, _)| ty == name && ours == field);
        write!(out, "({field}, {}), ", theirs.map_or(field.as_str(), |(_, _, theirs)| theirs)).unwrap();
    }
    writeln!(out, "]),").unwrap();
}

/// The functions, with as many blanks as each has arguments.
fn function_table(item: &Item, out: &mut String) {
    for Field { name, kind } in &item.fields {
        let arguments = kind.split_once("fn(").expect("a function").1;
        let count = arguments.split(") ->").next().unwrap().matches(": ").count();
        writeln!(out, "function!({}, {name}, [{}]),", item.name, "_, ".repeat(count)).unwrap();
    }
}
