//! Whether a text is well-formed XML, as far as a diagram needs it: one root, tags that close each other, attributes in quotes,
//! nothing that must be escaped.

/// The names of all elements, in order.
///
/// # Errors
/// What is wrong, in words.
pub(crate) fn elements(text: &str) -> Result<Vec<String>, String> {
    let (mut open, mut seen) = (Vec::<String>::new(), Vec::new());
    let mut rest = text;
    while let Some((before, tag)) = rest.split_once('<') {
        check_text(before, open.is_empty())?;
        let (tag, after) = tag.split_once('>').ok_or("a tag does not end")?;
        rest = after;
        if let Some(name) = tag.strip_prefix('/') {
            if open.pop().as_deref() != Some(name) {
                return Err(format!("</{name}> closes something else"));
            }
            continue;
        }
        let (tag, empty) = tag.strip_suffix('/').map_or((tag, false), |tag| (tag, true));
        let name: String = tag.chars().take_while(|c| !c.is_whitespace()).collect();
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric()) {
            return Err(format!("<{tag}> has no name"));
        }
        if open.is_empty() && !seen.is_empty() {
            return Err(format!("<{name}> is a second root"));
        }
        check_attributes(&tag[name.len()..])?;
        seen.push(name.clone());
        if !empty {
            open.push(name);
        }
    }
    check_text(rest, true)?;
    match open.pop() {
        Some(name) => Err(format!("<{name}> is not closed")),
        None if seen.is_empty() => Err("there is nothing".to_owned()),
        None => Ok(seen),
    }
}

fn check_text(text: &str, outside: bool) -> Result<(), String> {
    if outside && !text.trim().is_empty() {
        return Err(format!("text outside of the root: {text:?}"));
    }
    for (at, _) in text.match_indices('&') {
        if !["&amp;", "&lt;", "&gt;", "&quot;"].iter().any(|entity| text[at..].starts_with(entity)) {
            return Err(format!("a bare & in {text:?}"));
        }
    }
    match text.contains('>') || text.chars().any(|c| c.is_control() && c != '\n') {
        true => Err(format!("a character that must be escaped in {text:?}")),
        false => Ok(()),
    }
}

fn check_attributes(mut rest: &str) -> Result<(), String> {
    let mut names = Vec::new();
    loop {
        rest = rest.trim_start();
        if rest.is_empty() {
            return Ok(());
        }
        let (name, value) = rest.split_once("=\"").ok_or_else(|| format!("no attribute: {rest:?}"))?;
        let (value, after) = value.split_once('"').ok_or_else(|| format!("{name} has no end"))?;
        check_text(value, false)?;
        if names.contains(&name) {
            return Err(format!("{name} comes twice"));
        }
        names.push(name);
        rest = after;
    }
}

#[test]
fn what_is_not_well_formed_is_found() {
    assert_eq!(elements("<a b=\"1\"><c/>x &amp; y</a>\n").unwrap(), ["a", "c"]);
    for wrong in [
        "",
        "x",
        "<a>",
        "<a></b>",
        "<a/><b/>",
        "<a b=1/>",
        "<a b=\"1\" b=\"2\"/>",
        "<a>&</a>",
        "<a>></a>",
        "<a",
    ] {
        assert!(elements(wrong).is_err(), "{wrong:?}");
    }
}
