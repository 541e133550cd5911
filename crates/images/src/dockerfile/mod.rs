//! Dockerfiles: the subset that means something for a template, read with the `parse-dockerfile`
//! crate and turned into steps. What is not in the subset is refused with its line, never left out
//! in silence (BC-120).
//!
//! ```text
//!   text ─▶ Dockerfile { image, instructions, start, remarks }     pure
//!             COPY ─▶ context ─▶ an archive for each                reads the folder
//! ```

mod context;
mod words;

use std::collections::BTreeMap;

use parse_dockerfile::{Command, Flag, Instruction, Source as Item, UnescapedString};

pub use context::{Context, ContextError};

use crate::definition::Start;

/// A line that cannot be carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct DockerfileError {
    /// The line, counted from one.
    pub line: usize,
    /// What is wrong with it.
    pub problem: String,
}

/// What a Dockerfile asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dockerfile {
    /// The image that it begins with.
    pub image: String,
    /// What is done, with the line of each.
    pub instructions: Vec<(usize, DockerStep)>,
    /// What its sandboxes have running.
    pub start: Start,
    /// Lines that have no effect here, and why.
    pub remarks: Vec<(usize, String)>,
}

/// One instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DockerStep {
    /// Files of the context are copied.
    Copy {
        /// What.
        sources: Vec<String>,
        /// Where to.
        destination: String,
        /// Whose they become; root's unless given.
        owner: Option<String>,
        /// Their mode.
        mode: Option<u32>,
    },
    /// A command is run.
    Run {
        /// The command.
        command: String,
        /// The values of `ARG`s that it sees.
        arguments: BTreeMap<String, String>,
    },
    /// Variables are set.
    Env(Vec<(String, String)>),
    /// The working directory is changed.
    Workdir(String),
    /// The user is changed.
    User(String),
}

type Read<T> = Result<T, DockerfileError>;

/// Reads a Dockerfile; `given` are values of its `ARG`s.
///
/// # Errors
/// The first line that is wrong, or that is not supported.
pub fn parse(text: &str, given: &BTreeMap<String, String>) -> Read<Dockerfile> {
    let file = parse_dockerfile::parse(text).map_err(|error| DockerfileError {
        line: line_in_message(&error.to_string()),
        problem: error.to_string(),
    })?;
    let mut reader = Reader {
        text,
        given,
        arguments: BTreeMap::new(),
        image: None,
        instructions: Vec::new(),
        entrypoint: None,
        command: None,
        remarks: Vec::new(),
    };
    for instruction in &file.instructions {
        reader.take(instruction)?;
    }
    reader.finish()
}

/// The parser tells where it stopped as `… at line N …`.
fn line_in_message(message: &str) -> usize {
    let behind = message.split("line ").nth(1).unwrap_or_default();
    let digits: String = behind.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(1)
}

struct Reader<'a> {
    text: &'a str,
    given: &'a BTreeMap<String, String>,
    /// `ARG`s that are known at this point, with their values.
    arguments: BTreeMap<String, String>,
    image: Option<String>,
    instructions: Vec<(usize, DockerStep)>,
    entrypoint: Option<Vec<String>>,
    command: Option<Vec<String>>,
    remarks: Vec<(usize, String)>,
}

impl Reader<'_> {
    fn line(&self, offset: usize) -> usize {
        let before = self.text.as_bytes().iter().take(offset);
        before.filter(|byte| **byte == b'\n').count() + 1
    }

    fn refused(&self, offset: usize, problem: impl Into<String>) -> DockerfileError {
        DockerfileError {
            line: self.line(offset),
            problem: problem.into(),
        }
    }

    fn take(&mut self, instruction: &Instruction<'_>) -> Read<()> {
        match instruction {
            Instruction::From(from) => {
                let offset = from.from.span.start;
                if self.image.is_some() {
                    let problem = "more than one FROM is not supported: build what is copied from \
                                   another stage before, or in the one stage";
                    return Err(self.refused(offset, problem));
                }
                for flag in &from.options {
                    match (&*flag.name.value, flag.value.as_ref().map(|v| &*v.value)) {
                        ("platform", Some("linux/amd64" | "$TARGETPLATFORM")) => {}
                        _ => return Err(self.refused_flag(flag)),
                    }
                }
                let image = self.substituted(&from.image);
                if image == "scratch" {
                    return Err(self.refused(offset, "an empty image has no shell to run anything"));
                }
                // Those before FROM are known to FROM only.
                self.arguments.clear();
                self.image = Some(image);
                Ok(())
            }
            Instruction::Arg(arg) => self.take_arguments(&arg.arguments),
            Instruction::Env(env) => {
                let offset = env.env.span.start;
                let pairs = words::pairs(&env.arguments.value)
                    .ok_or_else(|| self.refused(offset, "ENV needs NAME=value"))?;
                let substituted = pairs.into_iter().map(|(name, value)| {
                    let value = words::substitute(&value, &self.arguments);
                    (name, value)
                });
                let pairs: Vec<(String, String)> = substituted.collect();
                // A variable hides an argument of the same name.
                for (name, _) in &pairs {
                    self.arguments.remove(name);
                }
                self.push(offset, DockerStep::Env(pairs));
                Ok(())
            }
            Instruction::Run(run) => {
                let offset = run.run.span.start;
                if let Some(flag) = run.options.first() {
                    return Err(self.refused_flag(flag));
                }
                let command = match (&run.arguments, &run.here_docs[..]) {
                    (command, []) => command_line(command),
                    (Command::Shell(shell), [document])
                        if shell.value.trim_start().starts_with("<<") =>
                    {
                        document.value.to_string()
                    }
                    _ => {
                        let problem = "only a RUN that is a here-document as a whole is supported";
                        return Err(self.refused(offset, problem));
                    }
                };
                let arguments = self.arguments.clone();
                self.push(offset, DockerStep::Run { command, arguments });
                Ok(())
            }
            Instruction::Copy(copy) => {
                let offset = copy.copy.span.start;
                let (mut owner, mut mode) = (None, None);
                for flag in &copy.options {
                    let value = flag.value.as_ref().map(|value| self.substituted(value));
                    match (&*flag.name.value, value) {
                        ("chown", Some(value)) => owner = Some(value),
                        ("chmod", Some(value)) => {
                            let read = u32::from_str_radix(&value, 8).ok();
                            let read = read.filter(|mode| *mode <= 0o7777);
                            let wrong = || self.refused(offset, "--chmod needs an octal mode");
                            mode = Some(read.ok_or_else(wrong)?);
                        }
                        // How layers are kept is no business of a template's author.
                        ("link", _) => {}
                        _ => return Err(self.refused_flag(flag)),
                    }
                }
                let mut sources = Vec::new();
                for item in &copy.src {
                    match item {
                        Item::Path(path) => sources.push(self.substituted(path)),
                        _ => return Err(self.refused(offset, "a here-document cannot be copied")),
                    }
                }
                let step = DockerStep::Copy {
                    sources,
                    destination: self.substituted(&copy.dest),
                    owner,
                    mode,
                };
                self.push(offset, step);
                Ok(())
            }
            Instruction::Workdir(workdir) => {
                let path = self.substituted(&workdir.arguments);
                self.push(workdir.workdir.span.start, DockerStep::Workdir(path));
                Ok(())
            }
            Instruction::User(user) => {
                let name = self.substituted(&user.arguments);
                self.push(user.user.span.start, DockerStep::User(name));
                Ok(())
            }
            Instruction::Cmd(cmd) => {
                self.command = Some(argument_list(&cmd.arguments));
                Ok(())
            }
            Instruction::Entrypoint(entrypoint) => {
                self.entrypoint = Some(argument_list(&entrypoint.arguments));
                Ok(())
            }
            Instruction::Expose(expose) => {
                let text = "EXPOSE has no effect: every port of a sandbox can be reached";
                self.remark(expose.expose.span.start, text);
                Ok(())
            }
            Instruction::Label(label) => {
                self.remark(label.label.span.start, "LABEL has no effect");
                Ok(())
            }
            Instruction::Maintainer(maintainer) => {
                let offset = maintainer.maintainer.span.start;
                self.remark(offset, "MAINTAINER has no effect");
                Ok(())
            }
            Instruction::Add(add) => {
                let problem = "ADD is not supported: use COPY, or RUN with curl or tar";
                Err(self.refused(add.add.span.start, problem))
            }
            Instruction::Healthcheck(check) => {
                let problem = "HEALTHCHECK is not supported: give a ready command";
                Err(self.refused(check.healthcheck.span.start, problem))
            }
            Instruction::Onbuild(onbuild) => {
                Err(self.refused(onbuild.onbuild.span.start, "ONBUILD is not supported"))
            }
            Instruction::Shell(shell) => {
                let problem = "SHELL is not supported: commands are run by bash";
                Err(self.refused(shell.shell.span.start, problem))
            }
            Instruction::Stopsignal(stop) => {
                Err(self.refused(stop.stopsignal.span.start, "STOPSIGNAL is not supported"))
            }
            Instruction::Volume(volume) => {
                let problem = "VOLUME is not supported: a template's files are all in its root";
                Err(self.refused(volume.volume.span.start, problem))
            }
            _ => Err(self.refused(0, "an instruction is not supported")),
        }
    }

    fn take_arguments(&mut self, arguments: &UnescapedString<'_>) -> Read<()> {
        let list = words::declarations(&arguments.value)
            .ok_or_else(|| self.refused(arguments.span.start, "ARG needs NAME or NAME=value"))?;
        for (name, default) in list {
            let default = default.map(|value| words::substitute(&value, &self.arguments));
            let value = self.given.get(&name).cloned().or(default);
            if let Some(value) = value {
                self.arguments.insert(name, value);
            }
        }
        Ok(())
    }

    fn refused_flag(&self, flag: &Flag<'_>) -> DockerfileError {
        let problem = format!("--{} is not supported", flag.name.value);
        self.refused(flag.flag_span().start, problem)
    }

    fn substituted(&self, text: &UnescapedString<'_>) -> String {
        words::substitute(&text.value, &self.arguments)
    }

    fn push(&mut self, offset: usize, step: DockerStep) {
        let line = self.line(offset);
        self.instructions.push((line, step));
    }

    fn remark(&mut self, offset: usize, text: &str) {
        let line = self.line(offset);
        self.remarks.push((line, text.to_owned()));
    }

    fn finish(self) -> Read<Dockerfile> {
        let missing = DockerfileError {
            line: 1,
            problem: String::from("FROM is missing"),
        };
        let start = match (&self.entrypoint, &self.command) {
            // What the image itself would run is for a container, which ends with it.
            (None, None) => Start::AsDefined,
            _ => Start::OfImage {
                entrypoint: self.entrypoint,
                arguments: self.command,
            },
        };
        Ok(Dockerfile {
            image: self.image.ok_or(missing)?,
            instructions: self.instructions,
            start,
            remarks: self.remarks,
        })
    }
}

/// What a shell is given to run.
fn command_line(command: &Command<'_>) -> String {
    match command {
        Command::Exec(list) => {
            let quoted: Vec<String> = list.value.iter().map(|w| words::quoted(&w.value)).collect();
            quoted.join(" ")
        }
        Command::Shell(text) => words::without_comments(text.value),
        _ => String::new(),
    }
}

/// Program and arguments; a shell's line is given to one.
fn argument_list(command: &Command<'_>) -> Vec<String> {
    match command {
        Command::Exec(list) => list.value.iter().map(|w| w.value.to_string()).collect(),
        other => vec![
            String::from("/bin/sh"),
            String::from("-c"),
            command_line(other),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Read<Dockerfile> {
        parse(text, &BTreeMap::new())
    }

    fn steps(text: &str) -> Vec<DockerStep> {
        let read = read(&format!("FROM debian:12\n{text}")).unwrap();
        read.instructions
            .into_iter()
            .map(|(_, step)| step)
            .collect()
    }

    #[test]
    fn the_subset_becomes_steps() {
        // BC-120
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        let text = "ENV P=\"a b\" Q=c\\ d R='$x'\nENV OLD some value\nWORKDIR /srv/app\nUSER 1234\n\
            COPY --chown=me:us --chmod=0755 [\"a\", \"b c\", \"/to/\"]\nRUN echo one \\\n  # comment\n  two\n\
            RUN [\"echo\", \"a b\"]\n";
        let steps = steps(text);
        let env = vec![pair("P", "a b"), pair("Q", "c d"), pair("R", "\\$x")];
        assert_eq!(steps[0], DockerStep::Env(env));
        assert_eq!(steps[1], DockerStep::Env(vec![pair("OLD", "some value")]));
        assert_eq!(steps[2], DockerStep::Workdir(String::from("/srv/app")));
        assert_eq!(steps[3], DockerStep::User(String::from("1234")));
        let DockerStep::Copy {
            sources,
            owner,
            mode,
            ..
        } = &steps[4]
        else {
            panic!("{steps:?}");
        };
        assert_eq!(sources, &["a", "b c"]);
        assert_eq!((owner.as_deref(), *mode), (Some("me:us"), Some(0o755)));
        let DockerStep::Run { command, .. } = &steps[5] else {
            panic!("{steps:?}");
        };
        assert!(
            command.contains("two") && !command.contains("comment"),
            "{command}"
        );
        let exec = DockerStep::Run {
            command: String::from("'echo' 'a b'"),
            arguments: BTreeMap::new(),
        };
        assert_eq!(steps[6], exec);
    }

    #[test]
    fn arguments_are_values_of_the_build() {
        let given = BTreeMap::from([(String::from("TAG"), String::from("13"))]);
        let text = "ARG TAG=12\nFROM debian:$TAG\nARG TAG\nARG V=1 W\nRUN make $V\nENV V=env\n\
                    WORKDIR /srv/$V/$TAG\n";
        let read = parse(text, &given).unwrap();
        assert_eq!(read.image, "debian:13");
        let steps: Vec<&DockerStep> = read.instructions.iter().map(|(_, step)| step).collect();
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        let run = DockerStep::Run {
            command: String::from("make $V"),
            arguments: BTreeMap::from([pair("TAG", "13"), pair("V", "1")]),
        };
        assert_eq!(steps[0], &run);
        // The variable is in place of the argument from here on, and known when it is built.
        assert_eq!(steps[2], &DockerStep::Workdir(String::from("/srv/$V/13")));
    }

    #[test]
    fn what_runs_is_what_the_file_says() {
        let start = |text: &str| read(&format!("FROM x\n{text}")).unwrap().start;
        assert_eq!(start(""), Start::AsDefined);
        let list = |words: &[&str]| Some(words.iter().map(|w| (*w).to_owned()).collect());
        assert_eq!(
            start("ENTRYPOINT [\"/run\"]\nCMD [\"-v\"]\n"),
            Start::OfImage {
                entrypoint: list(&["/run"]),
                arguments: list(&["-v"]),
            }
        );
        assert_eq!(
            start("CMD python -m http.server\n"),
            Start::OfImage {
                entrypoint: None,
                arguments: list(&["/bin/sh", "-c", "python -m http.server"]),
            }
        );
    }

    #[test]
    fn the_rest_is_refused_with_its_line() {
        // BC-120
        for (text, line) in [
            ("FROM a\nRUN x\nFROM b\n", 3),
            ("FROM a\nCOPY --from=b /x /y\n", 2),
            ("FROM a\n\nADD x /y\n", 3),
            ("FROM a\nVOLUME /data\n", 2),
            ("FROM a\nSHELL [\"/bin/sh\"]\n", 2),
            ("FROM a\nRUN --mount=type=cache,target=/x y\n", 2),
            ("FROM a\n# text\nHEALTHCHECK CMD true\n", 3),
            ("FROM a\nONBUILD RUN x\n", 2),
            ("FROM a\nSTOPSIGNAL 9\n", 2),
            ("FROM --platform=linux/arm64 a\n", 1),
            ("FROM scratch\n", 1),
            ("FROM a\nCOPY --chmod=u+x a b\n", 2),
            ("FROM a\nENV X\n", 2),
            ("FROM a\nFETCH x\n", 2),
        ] {
            let refused = read(text).unwrap_err();
            assert_eq!(refused.line, line, "{text}: {refused}");
        }
        assert!(read("").is_err() && read("# nothing\n").is_err());
    }

    #[test]
    fn lines_without_effect_are_told() {
        let read = read("FROM a\nEXPOSE 80\nLABEL a=b\n").unwrap();
        let lines: Vec<usize> = read.remarks.iter().map(|(line, _)| *line).collect();
        assert_eq!(lines, [2, 3]);
    }
}
